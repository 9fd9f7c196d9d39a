"""Answers to questions on texts, from a CSV of your own: `--config=configs/qa_csv.py:MODEL:SIZE`.

    python main.py --config=configs/qa_csv.py:flan_t5:base --config.restore.path=hf://google/flan-t5-base \
      --config.data.files=train.csv --config.data.validation_files=dev.csv --workdir=runs/qa
    python main.py --mode=infer --checkpoint=runs/qa --input=questions.csv

Reproduces: the extractive question answering of many Hugging Face posts: the question, a newline and the
context are the inputs, the answer is the target; three epochs, then exact match and F1 in
inference_eval/text_to_text-metrics.jsonl. Batches are split over all devices.
qa_csv.py:tiny fine-tunes the model of tiny.py in runs/tiny: it shows in minutes that everything works.
Data: columns question, context and answer, which is empty where the context has none, as in SQuAD 2.0.
Other names: --config.data.inputs='{q} {text}' --config.data.targets='{a}'. JSON Lines, TSV and Parquet
also work. Without validation_files, a tenth of the rows is held out. A thousand rows or fewer need
more epochs: --config.train.epochs=20.
Checkpoints: a name on the Hugging Face hub, a folder, T5X or Mesh-TF. T5 and Flan-T5 were trained on SQuAD 1.1.
T5X: t5x/configs/runs/finetune.gin with batches of 16 packed rows, about 45 questions of SQuAD.
Hardware and time: SQuAD 2.0 has 130,319 questions, 9,000 steps and 5e16 FLOPs with T5 base: minutes
on a GPU that sustains 100 TFLOP/s. `tiny` and 20 epochs of 200 rows: a minute or two on two CPU cores.
Number to expect: T5 base has exact match 77.64 and F1 81.32 on SQuAD 2.0's validation set (the model card
of mrm8488/t5-base-finetuned-squadv2 on Hugging Face).
"""

from configs import finetune, tiny


def get_config(model: str = 'flan_t5:base'):
    if model == 'tiny':
        config = tiny.get_config()
        config.model.dropout_rate = 0.1
        config.restore.path = 'runs/tiny'
        config.restore.only = 'target/.*'
        config.learning_rate.factors = 'constant'
        config.learning_rate.base_learning_rate = 0.01
    else:
        config = finetune.get_config(model)
        config.data.lengths.inputs = 512
        config.log.every_steps = 20
    config.data.task = 'text_to_text'
    config.data.inputs = '{question}\n{context}'
    config.data.targets = '{answer}'
    config.data.metrics = 'squad'
    config.data.allow_empty_targets = True
    config.data.validation_fraction = 0.1
    config.data.lengths.targets = 64
    config.train.epochs = 3
    config.train.relative_steps = 1_000_000  # the epochs end first
    config.train.batch_size = 16
    config.eval.every_steps = 1000
    config.infer_eval.every_steps = 1000
    config.save.every_steps = 1000
    return config
