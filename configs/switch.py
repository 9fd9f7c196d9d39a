"""Switch Transformer as released: `--config=configs/switch.py:SIZE` with base_8, … base_256, large_128, xxl_128 or c_2048.

    python main.py --config=configs/switch.py:base_8 --config.data.vocabulary=FILE --config.data.files=GLOB

Reproduces: the pretraining of Fedus et al. 2022 (Switch Transformers) with span corruption. To fine-tune,
set learning_rate.factors=constant, base_learning_rate=0.001, model.dropout_rate=0.1 and
model.options.expert_dropout_rate=0.4.
Flaxformer: t5x/configs/moe/models/switch_{base,large,xxl,c}.gin. Its groups of 8,192 tokens may cross
devices; here the tokens of a row share its places, so that the numbers do not depend on the mesh.
Experts: over mesh.model, or with model.options.split_experts=fsdp over mesh.fsdp.
Checkpoints: gs://t5-data/pretrained_models/t5x/moe/switch_classic/{base/e8/checkpoint_500100,
base/e{16,32,64,128,256}/checkpoint_550000, large/e128/checkpoint_483100, xxl/e128/checkpoint_634600,
c/e2048/checkpoint_611800}; on Hugging Face's hub google/switch-base-8 to -256 and google/switch-large-128.
Vocabulary: gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model.
Hardware and time: docs/scaling.md has plans; tests check names, shapes and number of parameters.
Number to expect: none is published for the loss of span corruption alone.
"""

from configs import base
from messages import Refused

SIZES = {
    'base': dict(emb_dim=768, num_heads=12, mlp_dim=3072),
    'large': dict(emb_dim=1024, num_heads=16, mlp_dim=4096),
    'xxl': dict(emb_dim=4096, num_heads=64, mlp_dim=10240, mlp_activations=('gelu', 'linear')),
    'c': dict(emb_dim=2080, num_heads=30, mlp_dim=6144),
}
LAYERS = {'base': 12, 'large': 24, 'xxl': 24, 'c': 15}
EXPERTS = {'base': (8, 16, 32, 64, 128, 256), 'large': (128,), 'xxl': (128,), 'c': (2048,)}


def get_config(size: str = 'base_8'):
    sizes = {f'{name}_{count}': (name, count) for name in EXPERTS for count in EXPERTS[name]}
    if size not in sizes:
        raise Refused(f'configs/switch.py:{size}: use one of {", ".join(sizes)}')
    name, num_experts = sizes[size]
    config = base.get_config()
    config.model.module = 'switch'
    config.model.mlp_activations = ('relu',)
    config.model.update(SIZES[name])
    config.model.dtype = 'bfloat16'
    config.model.num_encoder_layers = LAYERS[name]
    config.model.num_decoder_layers = LAYERS[name]
    config.model.logits_via_embedding = name in ('base', 'large')
    config.model.options.num_experts = num_experts
    config.model.options.sparse_step = 1 if name == 'c' else 2
    if name == 'c':
        config.model.options.train_expert_capacity_factor = 1.0
    if name == 'xxl':
        config.model.options.eval_expert_capacity_factor = 4.0
    if name in ('xxl', 'c'):
        config.model.options.min_expert_capacity = 2
    config.data.task = 'c4_v220_span_corruption'
    config.learning_rate.factors = 'constant * rsqrt_decay'
    config.learning_rate.base_learning_rate = 1.0
    config.learning_rate.warmup_steps = 10_000
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.train.steps = 550_000
    config.train.batch_size = 2048
    return config
