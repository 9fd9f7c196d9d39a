"""Fine-tunes LongT5 on long inputs: `--config=configs/long_t5.py:SIZE` with base, large or xl.

    python main.py --config=configs/long_t5.py:base --config.restore.path=CHECKPOINT \
      --config.data.vocabulary=FILE --config.data.files=articles.jsonl

Reproduces: the fine-tuning of Guo et al. 2022 (LongT5): a constant learning rate of 0.001, dropout 0.1,
batches of 128, 4,096 inputs and 512 targets; --config.data.lengths.inputs=16384 for arXiv, PubMed and
BigPatent. The task here is your own: records with the fields article and summary. The pretrained
models repeat sentences of their inputs, so they are always fine-tuned.
Attention: local and transient global; --config.model.options.encoder_attention=local for the
checkpoints local_base and local_large.
Flaxformer: t5x/configs/longt5/models/longt5_1_1_transient_global_SIZE.gin, and longt5_1_1_SIZE.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/longt5/tglobal_SIZE/checkpoint_1000000, local_base and
local_large; on Hugging Face's hub google/long-t5-tglobal-SIZE and google/long-t5-local-SIZE.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: docs/scaling.md has plans; tests check names, shapes and number of parameters.
Number to expect: xl has ROUGE-1, -2 and -L of 48.35, 21.92 and 44.27 on arXiv (Guo et al. 2022).
"""

from configs import finetune
from messages import Refused

SIZES = ('base', 'large', 'xl')


def get_config(size: str = 'base'):
    if size not in SIZES:
        raise Refused(f'size {size!r}: use one of {", ".join(SIZES)}')
    config = finetune.get_config(f't5_1_1:{size}')
    config.model.module = 'long_t5'
    config.model.options.update(
        encoder_attention='transient_global', local_radius=127, tokens_per_block=16
    )
    config.model.remat = 'full'
    config.data.task = 'text_to_text'
    config.data.inputs = '{article}'
    config.data.targets = '{summary}'
    config.data.metrics = 'rouge'
    config.data.lengths.inputs = 4096
    config.data.lengths.targets = 512
    config.decode.max_length = 512
    config.loss.loss_normalizing_factor = ''
    config.train.num_microbatches = 'auto'
    return config
