"""The names of T5's parameters in three programs: one table for reading and writing.

decoder/layers_3/mlp/wo/kernel                          T5X's path, and ours
decoder.block.3.layer.2.DenseReluDense.wo               transformers' name, without .weight
decoder/block_003/layer_002/DenseReluDense/wo/kernel    Mesh-TF's name
"""

import re
from collections.abc import Mapping

# {our path: transformers' name} of umT5, which has a bias in each layer; * is the number of a layer.
NAMES = {
    'token_embedder/embedding': 'shared',
    'encoder/layers_*/pre_attention_layer_norm/scale': 'encoder.block.*.layer.0.layer_norm',
    'encoder/layers_*/attention/query/kernel': 'encoder.block.*.layer.0.SelfAttention.q',
    'encoder/layers_*/attention/key/kernel': 'encoder.block.*.layer.0.SelfAttention.k',
    'encoder/layers_*/attention/value/kernel': 'encoder.block.*.layer.0.SelfAttention.v',
    'encoder/layers_*/attention/out/kernel': 'encoder.block.*.layer.0.SelfAttention.o',
    'encoder/layers_*/relpos_bias/rel_embedding': 'encoder.block.*.layer.0.SelfAttention.relative_attention_bias',
    'encoder/layers_*/pre_mlp_layer_norm/scale': 'encoder.block.*.layer.1.layer_norm',
    'encoder/layers_*/mlp/wi/kernel': 'encoder.block.*.layer.1.DenseReluDense.wi',
    'encoder/layers_*/mlp/wi_0/kernel': 'encoder.block.*.layer.1.DenseReluDense.wi_0',
    'encoder/layers_*/mlp/wi_1/kernel': 'encoder.block.*.layer.1.DenseReluDense.wi_1',
    'encoder/layers_*/mlp/wo/kernel': 'encoder.block.*.layer.1.DenseReluDense.wo',
    'encoder/encoder_norm/scale': 'encoder.final_layer_norm',
    'decoder/layers_*/pre_self_attention_layer_norm/scale': 'decoder.block.*.layer.0.layer_norm',
    'decoder/layers_*/self_attention/query/kernel': 'decoder.block.*.layer.0.SelfAttention.q',
    'decoder/layers_*/self_attention/key/kernel': 'decoder.block.*.layer.0.SelfAttention.k',
    'decoder/layers_*/self_attention/value/kernel': 'decoder.block.*.layer.0.SelfAttention.v',
    'decoder/layers_*/self_attention/out/kernel': 'decoder.block.*.layer.0.SelfAttention.o',
    'decoder/layers_*/relpos_bias/rel_embedding': 'decoder.block.*.layer.0.SelfAttention.relative_attention_bias',
    'decoder/layers_*/pre_cross_attention_layer_norm/scale': 'decoder.block.*.layer.1.layer_norm',
    'decoder/layers_*/encoder_decoder_attention/query/kernel': 'decoder.block.*.layer.1.EncDecAttention.q',
    'decoder/layers_*/encoder_decoder_attention/key/kernel': 'decoder.block.*.layer.1.EncDecAttention.k',
    'decoder/layers_*/encoder_decoder_attention/value/kernel': 'decoder.block.*.layer.1.EncDecAttention.v',
    'decoder/layers_*/encoder_decoder_attention/out/kernel': 'decoder.block.*.layer.1.EncDecAttention.o',
    'decoder/layers_*/pre_mlp_layer_norm/scale': 'decoder.block.*.layer.2.layer_norm',
    'decoder/layers_*/mlp/wi/kernel': 'decoder.block.*.layer.2.DenseReluDense.wi',
    'decoder/layers_*/mlp/wi_0/kernel': 'decoder.block.*.layer.2.DenseReluDense.wi_0',
    'decoder/layers_*/mlp/wi_1/kernel': 'decoder.block.*.layer.2.DenseReluDense.wi_1',
    'decoder/layers_*/mlp/wo/kernel': 'decoder.block.*.layer.2.DenseReluDense.wo',
    'decoder/decoder_norm/scale': 'decoder.final_layer_norm',
    'decoder/logits_dense/kernel': 'lm_head',
}  # fmt: skip
LAYER = re.compile(r'(/layers_|\.block\.|\.layers\.)(0|[1-9]\d{0,4})(?=[/.])')


def names_of(is_per_layer: bool) -> dict[str, str]:
    """Return NAMES; unless `is_per_layer`, for a model whose layers share a relative position bias."""
    names = dict(NAMES)
    if not is_per_layer:
        for stack in ('encoder', 'decoder'):
            name = names.pop(f'{stack}/layers_*/relpos_bias/rel_embedding')
            names[f'{stack}/relpos_bias/rel_embedding'] = name.replace('*', '0')
    return names


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    """Return {transformers' name: our path}."""
    return {name: path for path, name in names.items()}


def translate(name: str, names: Mapping[str, str]) -> str:
    """Return the entry for `name` in `names`, a table such as NAMES or its inverse, or else ''."""
    layer = LAYER.search(name)
    if name in names or layer is None:
        return names.get(name, '')
    return names.get(LAYER.sub(r'\1*', name), '').replace('*', layer[2])
