"""One vector for each text, as in sentence-transformers' Sentence-T5 and GTR.

    modules.json                  the modules in their order, each with its folder: the encoder, then
    1_Pooling/config.json         the mean over the tokens, the only supported pooling
    2_Dense/config.json           a dense layer and its activation; model.safetensors has its arrays
    3_Normalize                   division by the length of the vector
    sentence_bert_config.json     the maximum tokens of a text; else in tokenizer_config.json

Source: sentence_transformers (6.2) base/modules, sentence_transformer/modules/pooling.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging
from numpy.typing import NDArray

import paths
from formats import hugging_face
from messages import Refused

MODULES = 'modules.json'
MOST_TOKENS = 10**6  # transformers writes a larger number for no limit
POOLING_MODES = ('mean', ['mean'], ['pooling_mode_mean_tokens'])
ACTIVATIONS: dict[str, Callable[[NDArray], NDArray]] = {'Identity': lambda x: x, 'Tanh': np.tanh}
# The kinds of modules, and the supported values of their settings.
SETTINGS: dict[str, dict[str, tuple]] = {
    'Transformer': {'do_lower_case': (False,)},
    'Pooling': {'pooling_mode': POOLING_MODES},
    'Dense': {
        'activation_function': tuple(ACTIVATIONS),
        'use_residual': (False,),
        'module_input_name': ('sentence_embedding',),
    },
    'Normalize': {'module_input_name': ('sentence_embedding',)},
}


class Pooling(NamedTuple):
    """The mean of a text's tokens, and the modules that follow it."""

    modules: tuple[Callable[[NDArray], NDArray], ...] = ()
    max_length: int = 0  # tokens of a text, EOS included; 0 if the folder does not say

    def __call__(self, outputs_bMD: NDArray, mask_bM: NDArray) -> NDArray:
        """Return the vector of each text, float32 [b, E], from the results of `infer.T5.encode`."""
        means = []
        for outputs_MD, mask_M in zip(outputs_bMD, mask_bM, strict=True):
            means.append(outputs_MD[mask_M].mean(axis=0))
        x_bD = np.stack(means)
        for module in self.modules:
            x_bD = module(x_bD)
        return x_bD


def read(folder: paths.AnyPath) -> Pooling:
    """Return the pooling of a folder's model. Raises Refused for unsupported modules."""
    file = folder / MODULES
    if not paths.is_file(file):
        if hugging_face.is_folder(folder):
            logging.warning('%s has no %s: vectors are means of the tokens alone', folder, MODULES)
        return Pooling()
    content = b'{"modules": %b}' % file.read_bytes()
    parts = []
    for module in paths.json_object(content, str(file), 'copy the folder again')['modules']:
        parts.append((module['type'].split('.')[-1], folder / module['path']))
    kinds = [kind for kind, _ in parts]
    if kinds[:2] != ['Transformer', 'Pooling'] or not {*kinds[2:]} <= {'Dense', 'Normalize'}:
        raise Refused(f'{file} has {kinds}: must be {", ".join(SETTINGS)}: use --pool=none')
    modules: list[Callable[[NDArray], NDArray]] = []
    for kind, part in parts:
        settings = settings_of(kind, part)
        if kind == 'Transformer':
            max_length = settings.get('max_seq_length') or settings.get('model_max_length') or 0
        elif kind == 'Dense':
            modules.append(read_dense(part, settings['activation_function']))
        elif kind == 'Normalize':
            modules.append(normalize)
    if max_length > MOST_TOKENS:
        max_length = 0
    return Pooling(tuple(modules), max_length)


def settings_of(kind: str, part: paths.AnyPath) -> dict:
    """Return the settings of a module. Raises Refused for unsupported values."""
    names = ['config.json']
    if kind == 'Transformer':
        names = ['tokenizer_config.json', 'sentence_bert_config.json']
    settings: dict = {}
    for name in names:
        file = part / name
        if paths.is_file(file):
            settings |= paths.read_json(file)
    if kind == 'Pooling' and 'pooling_mode' not in settings:  # before version 6
        modes = [name for name in settings if name.startswith('pooling_mode_') and settings[name]]
        settings['pooling_mode'] = modes
    if kind == 'Dense':
        name = settings.get('activation_function', 'Tanh')
        settings['activation_function'] = name.split('.')[-1]
    for name, values in SETTINGS[kind].items():
        if settings.get(name, values[0]) not in values:
            raise Refused(f'{file}: {name}={settings[name]}: must be {values[0]}: use --pool=none')
    return settings


def read_dense(part: paths.AnyPath, activation: str) -> Callable[[NDArray], NDArray]:
    """Return the function of a dense layer. Its arrays are linear.weight [E, D] and, if it has one, linear.bias."""
    file = part / hugging_face.WEIGHTS
    if not paths.is_file(file):
        raise Refused(
            f'{part} has no {file.name}: copy it; other files are not read: {hugging_face.SAVE_AGAIN}'
        )
    arrays = {}
    for name, entry in hugging_face.read_header(hugging_face.on_disk(file)).items():
        arrays[name] = entry.read().astype(np.float32)
    kernel_DE = arrays['linear.weight'].T
    bias_E = arrays.get('linear.bias', np.float32(0))
    return functools.partial(dense, kernel_DE, bias_E, ACTIVATIONS[activation])


def dense(kernel_DE, bias_E, activation, x_bD):
    return activation(x_bD @ kernel_DE + bias_E)


def normalize(x_bD: NDArray) -> NDArray:
    """Return x divided by its length, as torch's normalize does."""
    return x_bD / np.maximum(np.linalg.norm(x_bD, axis=-1, keepdims=True), np.float32(1e-12))
