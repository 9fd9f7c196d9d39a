"""promptsource's templates: tasks on your own data sets, and on those that are not in P3.

Story Cloze, for one, is available on request. With its file and promptsource's templates, this file
defines its twelve tasks, and t0_eval_score_eval uses them with --config.data.module:

    from tasks import promptsource

    TASKS = promptsource.tasks(
        'promptsource/templates/story_cloze/2016/templates.yaml',
        validation_files='cloze_test_val__spring2016.csv',
        fields_fn=promptsource.story_cloze,
    )

Needs jinja2: pip install -e '.[prompts]'. Source: bigscience-workshop/promptsource 7dab96a,
promptsource/templates.py; t-zero 7a699e3, t0/seqio_tasks/utils.py. Imports no jax.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable

import jinja2
import jinja2.meta
import jinja2.sandbox
import yaml

import paths
from messages import Refused
from sources import NO_SPLIT
from tasks import t0 as tasks_t0
from tasks.mixtures import PreprocessFn, Task
from tasks.preprocessors import Fields, Texts

SEPARATOR = '|||'  # between inputs and targets, and between choices
PROTECTED = '\x00separator\x00'  # replaces a separator within a field
MAX_CHARACTERS = 2048  # a longer value is cut in a template
NO_LABEL = '<NO LABEL>'  # replaces empty targets


ENVIRONMENT = jinja2.sandbox.SandboxedEnvironment()
ENVIRONMENT.globals['zip'] = zip
del ENVIRONMENT.filters['random']  # like promptsource's `choice`, it gives another text each time


def tasks(
    templates_file: str,
    files: str = '',
    validation_files: str = '',
    fields_fn: Callable[[Fields], Fields] = dict,
) -> list[Task]:
    """Return the tasks of all templates in a file, under the names that T0 has for them.

    `files`, `validation_files`: the files with the records, as data.files. `fields_fn`: from the fields
    of a record to the fields of the templates.
    """
    content = read_templates(templates_file)
    dataset = '/'.join(filter(None, [content['dataset'], content.get('subset')]))
    tasks = []
    for entry in content['templates'].values():
        template = Template(entry, templates_file)
        prompt = prompt_of(dataset, template)
        name = tasks_t0.task_name(dataset, template.name)
        task = dataclasses.replace(
            tasks_t0.text_task(prompt, name),
            cache='',
            files=files,
            validation_files=validation_files,
            train_split='train' if files else NO_SPLIT,
            validation_split='',
            preprocess_fn=compose(template.examples, fields_fn),
        )
        tasks.append(task)
        if prompt.num_choices:
            ranked = dataclasses.replace(
                tasks_t0.score_task(prompt, name),
                cache='',
                validation_files=validation_files or files,
                validation_split='',
                preprocess_fn=compose(template.choice_examples, fields_fn),
            )
            tasks.append(ranked)
    return tasks


def read_templates(file: str) -> Texts:
    return yaml.load(paths.disk_path(file).read_text(encoding='utf-8'), Loader=TemplateLoader)


class TemplateLoader(yaml.SafeLoader):
    """Reads promptsource's own classes as dicts."""


TemplateLoader.add_multi_constructor(
    '!', lambda loader, tag, node: loader.construct_mapping(node, deep=True)
)


def prompt_of(dataset: str, template: 'Template') -> tasks_t0.Prompt:
    """Return a template as a row of t0_prompts.csv."""
    metrics = template.metadata['metrics'] or []
    return tasks_t0.Prompt(
        dataset=dataset,
        name=template.name,
        is_original_task=bool(template.metadata['original_task']),
        num_choices=template.num_choices(),
        metrics=tuple(name for name in metrics if name in tasks_t0.METRICS),
    )


def compose(examples: PreprocessFn, fields_fn: Callable[[Fields], Fields]) -> PreprocessFn:
    return lambda record: examples(fields_fn(record))


class Template:
    """One of promptsource's templates, in Jinja."""

    def __init__(self, entry: Fields, file: str = ''):
        self.file = file
        self.name: str = entry['name']
        self.metadata: Fields = entry['metadata']
        self.jinja: str = entry['jinja']
        self.choices_jinja: str | None = entry['answer_choices']

    @functools.cached_property
    def compiled(self) -> jinja2.Template:
        """The template, which cuts each of its values."""
        cut = f' | string | truncate({MAX_CHARACTERS}) }}}}'
        return ENVIRONMENT.from_string(self.jinja.replace('}}', cut))

    def num_choices(self) -> str:
        """Return the number of choices; 'vary' if examples have their own, '' if there are none."""
        if self.choices_jinja is None:
            return ''
        if jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(self.choices_jinja)):
            return 'vary'
        return str(len(self.choices({}) or []))

    def choices(self, fields: Fields) -> list[str] | None:
        """Return the choices of a record; None if the template has none."""
        if self.choices_jinja is None:
            return None
        return split(ENVIRONMENT.from_string(self.choices_jinja).render(**protected(fields)))

    def render(self, fields: Fields) -> list[str]:
        """Return inputs and targets; another number of texts if the record does not fit."""
        try:
            choices = self.choices(fields)
            return split(self.compiled.render(**protected(fields), answer_choices=choices))
        except jinja2.TemplateError as error:
            raise Refused(f'{self.file}: template {self.name!r} cannot be used: {error}') from error

    def examples(self, fields: Fields) -> list[Texts]:
        """Return the example of a record, none if the record does not fit."""
        texts = self.render(fields)
        if len(texts) != 2 or not texts[0]:
            return []
        example: Texts = {'inputs': texts[0], 'targets': texts[1] or NO_LABEL}
        if self.choices_jinja is not None:
            example['answer_choices'] = self.choices(fields)
        return [example]

    def choice_examples(self, fields: Fields) -> list[Texts]:
        """Return an example for each choice of a record, to be ranked.

        Differs from T0, where 'idx' has the number of a record: here it is a hash of its fields.
        """
        content = json.dumps(fields, sort_keys=True, default=repr).encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), 'big')
        examples = []
        for example in self.examples(fields):
            for i, choice in enumerate(example['answer_choices']):
                is_correct = choice == example['targets']
                ranked = {'idx': (number, i), 'is_correct': is_correct, 'weight': 1.0}
                examples.append(ranked | {'inputs': example['inputs'], 'targets': choice})
        return examples


def protected(fields: Fields) -> Texts:
    """Return the fields under names that a template can write, with the separators in their texts replaced."""
    names = {name.replace('-', '_'): value for name, value in fields.items()}
    for name, value in names.items():
        if isinstance(value, str):
            names[name] = value.replace(SEPARATOR, PROTECTED)
    return names


def split(rendered: str) -> list[str]:
    """Return the texts between the separators."""
    return [text.replace(PROTECTED, SEPARATOR).strip() for text in rendered.split(SEPARATOR)]


def story_cloze(fields: Fields) -> Texts:
    """Return the templates' fields from a row of Story Cloze's CSV file."""
    template_fields = {
        'story_id': fields['InputStoryid'],
        'sentence_quiz1': fields['RandomFifthSentenceQuiz1'],
        'sentence_quiz2': fields['RandomFifthSentenceQuiz2'],
        'answer_right_ending': int(fields['AnswerRightEnding']),
    }
    for i in (1, 2, 3, 4):
        template_fields[f'input_sentence_{i}'] = fields[f'InputSentence{i}']
    return template_fields
