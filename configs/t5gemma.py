"""T5Gemma as released, to fine-tune: `--config=configs/t5gemma.py:SIZE` with s, b, l, ml, xl, 2b, 9b or 9b_2b.

    python main.py --config=configs/t5gemma.py:2b --config.restore.path=FOLDER --config.data.vocabulary=FOLDER \
      --config.data.files=my.jsonl

The records have the fields inputs and targets, unless data.inputs and data.targets say otherwise. FOLDER is the
transformers folder of google/t5gemma-{s-s,b-b,l-l,ml-ml,xl-xl,2b-2b,9b-9b,9b-2b}-{ul2,prefixlm}, also with `-it`.
t5gemma.py:small and t5gemma.py:tiny start from scratch: span corruption with the shapes, and so the FLOPs, of
small_c4.py and tiny.py.

Reproduces: the models of Zhang et al. 2025 (T5Gemma). The settings of their training are not published.
Learning rates: Adafactor's are not multiplied by the parameters' scale here, since norms around 0 would then hardly
move. 2e-5 is T5X's 0.001 for fine-tuning, times the root mean square of a kernel.
T5X: none. Sizes: google-deepmind/gemma research/t5gemma/config.py.
Hardware and time: docs/scaling.md has plans; tests check names, shapes and number of parameters.
Number to expect: none is published.
"""

from configs import finetune, small_c4, tiny
from messages import Refused

GEMMA_2B = dict(emb_dim=2304, mlp_dim=9216, num_heads=8, head_dim=256)
GEMMA_9B = dict(emb_dim=3584, mlp_dim=14336, num_heads=16, head_dim=256)
SIZES = {
    's': dict(emb_dim=512, mlp_dim=1024, num_heads=8, head_dim=64),
    'b': dict(emb_dim=768, mlp_dim=2048, num_heads=12, head_dim=64),
    'l': dict(emb_dim=1024, mlp_dim=2816, num_heads=16, head_dim=64),
    'ml': dict(emb_dim=1152, mlp_dim=6912, num_heads=4, head_dim=256),
    'xl': dict(emb_dim=2048, mlp_dim=5120, num_heads=32, head_dim=64),
    '2b': GEMMA_2B,
    '9b': GEMMA_9B,
    '9b_2b': GEMMA_2B,
}
# Encoder, decoder.
LAYERS = {'s': (8, 8), 'b': (12, 12), 'l': (24, 24), 'ml': (26, 26), 'xl': (24, 24)}
LAYERS |= {'2b': (26, 26), '9b': (42, 42), '9b_2b': (42, 26)}


def get_config(size: str = '2b'):
    if size in ('small', 'tiny'):
        return from_scratch(size)
    if size not in SIZES:
        raise Refused(f'size {size!r}: use small or tiny, or use one of {", ".join(SIZES)}')
    config = finetune.get_config('t5_1_1:base')
    config.model.module = 't5gemma'
    config.model.update(SIZES[size])
    config.model.num_encoder_layers, config.model.num_decoder_layers = LAYERS[size]
    config.model.vocab_size = 256_000
    config.model.dropout_rate = 0.0
    config.model.logits_via_embedding = True
    config.model.options.num_kv_heads = config.model.num_heads
    if '2b' in size or '9b' in size:
        config.model.options.num_kv_heads //= 2
    if size == '9b_2b':
        sizes = {f'encoder_{name}': value for name, value in GEMMA_9B.items()}
        config.model.options.update(sizes, encoder_num_kv_heads=8)
    config.model.remat = 'full'
    config.data.task = 'text_to_text'
    config.data.inputs = '{inputs}'
    config.data.targets = '{targets}'
    config.data.extra_ids = 0
    config.data.sentinels = '<unused{}>'
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.optimizer.multiply_by_parameter_scale = False
    config.learning_rate.base_learning_rate = 2e-5
    return config


def from_scratch(size: str):
    """Return small_c4.py or tiny.py with T5Gemma's layers."""
    config = small_c4.get_config() if size == 'small' else tiny.get_config()
    config.model.module = 't5gemma'
    config.model.logits_via_embedding = True
    config.model.options.num_kv_heads = config.model.num_heads
    # About T5X's rate times the root mean square of a kernel, 1 / sqrt(emb_dim).
    config.learning_rate.base_learning_rate *= config.model.emb_dim**-0.5
    config.optimizer.multiply_by_parameter_scale = False
    return config
