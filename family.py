"""The interface between the program and a model: `Family`. The model itself is its `parts`, in model.py.

A user's file, or a file of the package families, changes a family (formats/own_model.py):

    def modules(family):
        parts = dataclasses.replace(family.parts, mlp=Mlp)
        return dataclasses.replace(family, parts=parts, losses=losses)
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import partition

Config = TypeVar('Config')  # model.T5Config
Parts = TypeVar('Parts')  # model.Parts


class Options(Protocol):
    """The settings of an own model: a frozen dataclass of its file."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]


def t5_flops(c, S: int, T: int) -> float:
    """Return the FLOPs of the matrix products in the forward pass of a row of S inputs and T targets."""
    a = c.num_heads * c.head_dim
    matrices = 4 * c.emb_dim * a + (len(c.mlp_activations) + 1) * c.emb_dim * c.mlp_dim
    encoder = 2 * S * matrices + 4 * S * S * a
    decoder = 2 * T * matrices + 4 * T * T * a + 4 * (T + S) * c.emb_dim * a + 4 * T * S * a
    logits = 2 * T * c.emb_dim * c.vocab_size
    return c.num_encoder_layers * encoder + c.num_decoder_layers * decoder + logits


def check_t5_mesh(c, mesh: Mesh) -> None:
    """Raise Refused for a mesh that does not split embedding, heads, MLP and vocabulary evenly."""
    partition.check_divides('model.emb_dim', c.emb_dim, ('fsdp',), mesh)
    for name in ('num_heads', 'mlp_dim', 'vocab_size'):
        partition.check_divides(f'model.{name}', getattr(c, name), ('model',), mesh)


@dataclasses.dataclass(frozen=True)
class Family(Generic[Config, Parts]):
    """A model, and the properties that the program needs, with T5's as defaults."""

    parts: Parts
    # (regular expression of paths, how these parameters are split). A later row replaces an equal expression.
    specs: tuple[tuple[str, P | Callable[[Config], P]], ...]
    # (config, input length, target length) -> FLOPs of a row's forward pass.
    flops: Callable[[Config, int, int], float] = t5_flops
    # config -> {name of an aux: coefficient}: the loss adds coefficient * mean over the rows.
    losses: Callable[[Config], Mapping[str, float]] = lambda config: {}
    # (config, mesh) -> None: raises Refused for a mesh that does not split all parts evenly.
    check_mesh: Callable[[Config, Mesh], None] = check_t5_mesh
    # config -> the config of the encoder's modules, if the encoder has other sizes.
    encoder_config: Callable[[Config], Config] = lambda config: config
    # config -> the number of layers in a step of a scan, above 1 if layers differ in parameters.
    period: Callable[[Config], int] = lambda config: 1
    # config -> regular expression of parameters that their modules use without a gather over 'fsdp'.
    split_in_use: Callable[[Config], str] = lambda config: ''
    # (config, T5's vocabulary.Ends) -> the special ids around texts.
    ends: Callable = lambda config, ends: ends
    may_pack: bool = True  # False: a row is one example
    # Regular expression of parameters trained and saved alone, on top of a base checkpoint.
    adapters: str = ''
    # (config, read, vocabulary, seed) -> {path: array}: their initial values, by default from the modules;
    # `read(path)` reads a parameter of the base.
    initial_adapters: Callable | None = None
    files: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)  # contents of user's files

    def param_specs(self, config: Config, paths: Iterable[str]) -> dict[str, P]:
        """Return {path: spec} of parameters."""
        table = {}
        for pattern, spec in self.specs:
            table[pattern] = spec(config) if callable(spec) else spec
        return partition.param_specs(table, paths)

    def specs_in_use(self, config: Config, paths: Iterable[str]) -> dict[str, P]:
        """Return {path: spec} of parameters gathered over 'fsdp' once for many calls."""
        specs = self.param_specs(config, paths)
        split = self.split_in_use(config)
        for path, spec in specs.items():
            if not re.fullmatch(split, path):
                specs[path] = partition.gathered(spec)
        return specs
