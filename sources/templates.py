"""Templates: texts with slots for the fields of a record."""

import re
from collections.abc import Mapping

from messages import Refused

# A literal, or a slot; the name in a slot may have braces in pairs.
PART = re.compile(r'((?:\{\{|\}\}|[^{}])+)|\{((?:[^{}]|\{\{?[^{}]*\}\}?)+)\}')


class Template:
    """A text such as 'question: {question}'; '{{' and '}}' are braces."""

    def __init__(self, key: str, text: str):
        self.key = key
        try:
            text.encode()  # bytes that are not UTF-8 arrive as half surrogate pairs
        except UnicodeEncodeError as error:
            raise Refused(f'{key}={text!r}: {error}; write it in UTF-8') from None
        if PART.sub('', text):
            raise Refused(
                f'{key}={text!r}: a brace without its pair: write {{{{ for a brace, {{FIELD}} for a slot; '
                'rename a column with such a brace'
            )
        self.parts: list[tuple[str, str]] = []  # a literal or a field; the other is ''
        for literal, field in PART.findall(text):
            self.parts.append((single_braces(literal), single_braces(field)))
        self.fields = [field for _, field in self.parts if field]

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the text with the fields of a record in its slots."""
        texts = []
        for literal, field in self.parts:
            texts.append(literal)
            if field:
                texts.append(fields[field])
        return ''.join(texts)


def single_braces(text: str) -> str:
    return text.replace('{{', '{').replace('}}', '}')


def templates_of(settings) -> dict[str, Template]:
    """Return {feature: template} of `data.inputs` and `data.targets`; none if both are ''.

    `settings`: config.data, or a task. `references` stands for the targets.
    """
    if settings.targets and settings.references:
        raise Refused(f'data.references={settings.references!r} and data.targets: leave one out')
    key = 'data.references' if settings.references else 'data.targets'
    text = settings.references or settings.targets
    if settings.inputs and not text:
        raise Refused(f'data.inputs={settings.inputs!r} needs data.targets or data.references')
    if not text:
        return {}
    targets = Template(key, text)
    if not targets.fields:
        raise Refused(f"{key}={text!r} names no field: write one as '{{answer}}'")
    return {'inputs': Template('data.inputs', settings.inputs), 'targets': targets}


def fields_named(data_group) -> tuple[str, ...]:
    """Return the fields of a record that the settings name."""
    templates = templates_of(data_group)
    if not templates:
        return (data_group.text_field,)
    names = [field for template in templates.values() for field in template.fields]
    if data_group.weight:
        names.append(data_group.weight[1:-1])
    return tuple(dict.fromkeys(names))
