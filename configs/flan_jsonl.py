"""Flan-style fine-tuning on JSON Lines of your own: `--config=configs/flan_jsonl.py:SIZE`.

    python main.py --config=configs/flan_jsonl.py:base --config.restore.path=CHECKPOINT \
      --config.data.files='train-*.jsonl' --config.data.validation_files=dev.jsonl --workdir=runs/flan
    python main.py --mode=infer --checkpoint=runs/flan --input=prompts.jsonl

Reproduces: the settings of Chung et al. 2022 (Appendix E) for Flan-T5: packed rows of 1024 and 256
tokens, 64 in a batch, a constant rate of 5e-4, dropout 0.05. Here training takes three epochs, from a
released Flan-T5, or from the LM-adapted T5 1.1 that Flan-T5 started from.
Data: a line is {"inputs": "...", "targets": "..."}. For other names use data.inputs and data.targets,
such as --config.data.inputs='{instruction} {input}' --config.data.targets='{output}'. Without
validation_files a tenth of the lines is held out.
Metrics: exact match (accuracy) and ROUGE; data.metrics names others.
Checkpoints and vocabulary: as in configs/flan_t5.py, or a Hugging Face folder.
T5X: the model is t5x/examples/t5/t5_1_1/SIZE.gin. The gin of the run is not published.
Hardware and time: base takes 6.1e13 FLOPs a step, 0.6 s on a GPU that sustains 100 TFLOP/s.
Number to expect: depends on your data; the validation loss begins at the checkpoint's.
"""

from configs import flan_t5


def get_config(size: str = 'base'):
    config = flan_t5.get_config(size)
    config.data.task = 'text_to_text'
    config.data.inputs = '{inputs}'
    config.data.targets = '{targets}'
    config.data.metrics = 'accuracy,rouge'
    config.data.validation_fraction = 0.1
    config.train.epochs = 3
    config.train.relative_steps = 1_000_000  # the epochs end first
    config.infer_eval.every_steps = 1000
    return config
