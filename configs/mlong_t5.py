"""Fine-tunes mLongT5: `--config=configs/mlong_t5.py:SIZE` with base, large or xl.

    python main.py --config=configs/mlong_t5.py:base --config.restore.path=CHECKPOINT \
      --config.data.vocabulary=FILE --config.data.files=articles.jsonl

Reproduces: the fine-tuning of Uthus et al. 2023 (mLongT5), with the settings of configs/long_t5.py.
Flaxformer: t5x/configs/longt5/models/mlongt5_transient_global_SIZE.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/mlongt5/tglobal_SIZE; on Hugging Face's hub
agemagician/mlong-t5-tglobal-SIZE.
Vocabulary: gs://t5-data/vocabs/umt5.256000/sentencepiece.model, to which 300 sentinels are added.
Hardware and time: as for configs/long_t5.py.
Number to expect: not measured.
"""

from configs import long_t5


def get_config(size: str = 'base'):
    config = long_t5.get_config(size)
    config.model.vocab_size = 256384
    config.data.num_pieces = 256_000
    config.data.extra_ids = 300
    return config
