"""Prompt tuning of a frozen T5: `--config=configs/prompt_tuning.py:MODEL:SIZE`, by default t5_1_1_lm:base.

    python main.py --config=configs/prompt_tuning.py:t5_1_1_lm:xxl --config.data.tfds_dir=FOLDER \
      --config.data.task=super_glue_boolq_v102 --config.model.options.texts="('True', 'False')" \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE

Reproduces: Lester et al. 2021 (§3): a prompt of 100 vectors before the inputs of an LM-adapted T5 1.1, one for each
task of SuperGLUE; 30,000 steps of batches of 32 examples, a constant learning rate of 0.3, Adafactor without
parameter scale and with weight decay 1e-5. The prompt starts as the names of the classes (model.options.texts), then
frequent pieces of the vocabulary. All checkpoints are kept, a prompt each: the paper takes the best one.
prompt_tuning.py:tiny learns a prompt for the model of tiny.py in runs/tiny, from a CSV as in qa_csv.py.
Checkpoints: as in t5_1_1_lm.py, or a model of finetune.py.
T5X: google-research/prompt-tuning adds prompts to T5X.
Hardware and time: forward and backward pass take the FLOPs of fine-tuning on longer inputs, without its memory for
gradients and optimizer state.
Number to expect: Lester et al. 2021, Figure 1: equal to fine-tuning for XXL, lower for smaller models.
"""

from configs import finetune, qa_csv


def get_config(model: str = 't5_1_1_lm:base'):
    if model == 'tiny':
        config = qa_csv.get_config('tiny')
    else:
        config = finetune.get_config(model)
        config.data.task = 'super_glue_boolq_v102'
        config.data.lengths.targets = 62
        config.train.relative_steps = 30_000
        config.save.every_steps = 1000
    config.model.module = 'prompt_tuning'
    config.model.options.update(length=100, texts=())
    config.data.pack = 'no'
    config.optimizer.multiply_by_parameter_scale = False
    config.optimizer.weight_decay_rate = 1e-5
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.3
    config.train.batch_size = 32
    return config
