"""Every setting, once, with its unit, default and allowed values.

The other configs start from `get_config` and change values. The defaults are T5X's pretraining run
(t5x/configs/runs/pretrain.gin) of T5 1.1 small. `python main.py --help` prints all settings.
"""

from ml_collections import ConfigDict, FieldReference

from answers import options
from configs.setting import (
    BELOW_ONE,
    DEVICES,
    FRACTION,
    LARGEST_FLOAT,
    LAYERS,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    STEPS,
    STEPS_OR_NONE,
    WINDOW,
    Range,
    Setting,
)


def get_config() -> ConfigDict:
    """Return the defaults of all settings."""
    config = settings()
    with config.ignore_type():
        take_defaults(config)
    config.decode.max_length = config.data.lengths.get_oneway_ref('targets')
    config.train.num_microbatches = FieldReference('auto', field_type=object)  # or a number
    config.lock()
    config.model.options.unlock()  # model.module defines their names
    config.loss.options.unlock()  # and loss.module these
    return config


def take_defaults(group: ConfigDict) -> None:
    """Replace each Setting of a group with its default."""
    for name, value in group.items():
        if isinstance(value, ConfigDict):
            take_defaults(value)
        elif isinstance(value, Setting):
            group[name] = value.default


def settings() -> ConfigDict:
    """Return all settings: a Setting, or only its default if any value of the same type is allowed.

    data.task, data.metrics, optimizer.name, learning_rate.factors and model.mlp_activations are checked
    by the modules that define their names.
    """
    config = ConfigDict()

    # Seed of all randomness: initial parameters, dropout, order of the data, noise.
    config.seed = Setting(0, Range(0, 2**32 - 1))

    # The transformer, under T5X's field names.
    config.model = ConfigDict()
    # Rows of the embedding. At least the number of ids in the vocabulary.
    config.model.vocab_size = Setting(32128, Range(1, 2**24))
    # Dtype of the computation: float32 or bfloat16. Parameters are always float32.
    config.model.dtype = Setting('float32', choices=('float32', 'bfloat16'))
    # Width of the residual stream.
    config.model.emb_dim = Setting(512, SIZE)
    # Attention heads of each layer.
    config.model.num_heads = Setting(6, SIZE)
    # Layers of the encoder.
    config.model.num_encoder_layers = Setting(8, LAYERS)
    # Layers of the decoder.
    config.model.num_decoder_layers = Setting(8, LAYERS)
    # Width of each attention head.
    config.model.head_dim = Setting(64, SIZE)
    # Width of the feed-forward layers.
    config.model.mlp_dim = Setting(1024, SIZE)
    # Any of relu, gelu, silu, swish and linear. With several, their outputs are multiplied.
    config.model.mlp_activations = ('gelu', 'linear')
    # Fraction of the activations that dropout sets to zero.
    config.model.dropout_rate = Setting(0.0, BELOW_ONE)
    # True shares one table between input embeddings and output logits (T5 1.0).
    config.model.logits_via_embedding = False
    # True computes attention logits in float32, whatever model.dtype is.
    config.model.float32_attention_logits = False
    # Dtype of the product that makes the decoder's logits: T5X's float32, or bfloat16, which takes about 3 % off
    # the step of base on an H200.
    config.model.logits_dtype = Setting('float32', choices=('float32', 'bfloat16'))
    # True gives each layer its own relative position bias (umT5).
    config.model.relpos_bias_per_layer = False
    # Buckets of relative positions, each with a bias for every head: 48 in tFINE.
    config.model.relative_attention_num_buckets = Setting(32, Range(4, 2**16))
    # The distance from which on relative positions share the last bucket. Above half the buckets.
    config.model.relative_attention_max_distance = Setting(128, Range(3, 2**24))
    # Recomputation in the backward pass, to save memory: none; dots, all but the products with
    # parameters and the sums over devices; or full, each layer.
    config.model.remat = Setting('none', choices=('none', 'dots', 'full'))
    # True compiles one layer of the encoder and one of the decoder for all of them, which takes less
    # time and memory for large models.
    config.model.scan_layers = False
    # Rank of LoRA's adapters, which are trained instead of the kernels of restore.path; 0 for none.
    # A checkpoint then holds them alone. With Adafactor set optimizer.multiply_by_parameter_scale=False,
    # because adapters begin at 0, or use adamw.
    config.model.lora_rank = Setting(0, Range(0, 2**20))
    # Scale of the adapters: a kernel is kernel + lora_alpha / lora_rank * lora_a @ lora_b.
    config.model.lora_alpha = Setting(16.0, Range(1e-6, LARGEST_FLOAT))
    # Regular expression of the paths of the kernels that have adapters. The default follows Hu et
    # al. 2021; '.+/kernel' takes all.
    config.model.lora_targets = '.+/(query|value)/kernel'
    # A Python file of your own, as a path or as its name in the current folder, with a function
    # modules(family), which replaces parts of the model: examples/squared_relu/squared_relu.py. Or the
    # name of a family, a file in families/. Or several, with commas, applied in order. '' for T5.
    config.model.module = ''
    # The settings of that file, --config.model.options.NAME=VALUE: the fields of its frozen dataclass
    # Options. They have defaults, and 'range', 'choices' and 'help' in their metadata:
    # examples/sliding_window/sliding_window.py. --help --config.model.module=FILE lists them.
    config.model.options = ConfigDict()

    # Where examples come from.
    config.data = ConfigDict()
    # The task or mixture: one that --mode=tasks lists, one of data.module, or a task cache. A task of
    # T5 reads its TFDS data set, or instead the records that data.files or data.tfds name. An
    # objective takes the documents of data.files or data.tfds: span_corruption, iid_denoising,
    # drop_corrupted_tokens, mass_style, bert_style, deshuffling, principle_sentences, prefix_lm,
    # pack_prefix_lm_encoder_decoder, lm, full_lm, ul2. data.targets makes it text_to_text.
    config.data.task = 'span_corruption'
    # A Python file of your own, as a path or as its name in the current folder, with a list TASKS of
    # tasks.Task and tasks.Mixture. An entry with the name of one of ours replaces it.
    config.data.module = ''
    # Folders of SeqIO task caches, separated by commas, in which to look for data.task.
    config.data.cache_dirs = ''
    # Whether data.task is read from its cache: yes, no, or auto (if it has one).
    config.data.use_cached = Setting('auto', choices=('auto', 'yes', 'no'))
    # Files for training: globs, separated by commas. Each line is a record: a JSON object in files
    # named .json, .jsonl or .ndjson, a row in .parquet and in .csv and .tsv, whose first row names
    # the columns, and plain text in others. All but Parquet may be gzipped (.gz). Files may be in
    # buckets (gs://, s3://) or on the hub (hf://datasets/ORG/NAME/**/*.parquet). '' reads the English
    # of this Python's own documentation (pydoc).
    config.data.files = ''
    # Files for validation, in the same form. '' holds out validation_fraction of data.files.
    config.data.validation_files = ''
    # Files of the split test, in the same form, for --split=test and infer_eval.split=test. Training
    # reads none of their records.
    config.data.test_files = ''
    # Format of all these files, whatever their names: text, jsonl, csv, tsv or parquet. '' goes by the
    # extensions of their names. It also applies to --input, whatever the run's files were.
    config.data.kind = Setting('', choices=('', 'text', 'jsonl', 'csv', 'tsv', 'parquet'))
    # The character between the columns of tables, .csv and .tsv, such as ';', or tab: fields are then
    # quoted as in CSV. '' is a comma in .csv, and a tab in .tsv, where quotes are part of the text.
    # It also applies to --input, whatever the run's files were.
    config.data.delimiter = ''
    # Instead of files: a data set prepared by TFDS, NAME[/CONFIG][:VERSION] as in 'glue/cola:2.0.0', by
    # default the newest version. Several, separated by commas, must have the same features.
    config.data.tfds = ''
    # Folder of prepared TFDS data sets. '' is $TFDS_DATA_DIR, or ~/tensorflow_datasets.
    config.data.tfds_dir = ''
    # Split of data.tfds for training, as TFDS writes it: 'train', 'train[:90%]',
    # 'train[100:200]+test'. A split other than 'train' replaces a named task's split.
    config.data.train_split = 'train'
    # Split of data.tfds for validation; 'none' for none. '' is a named task's split, else the split
    # validation; if there is none, validation_fraction of data.train_split is held out.
    config.data.validation_split = ''
    # Field of a JSON object, column of a table, or feature of data.tfds that holds the text of a
    # document; 'meta/text' is within a field.
    config.data.text_field = 'text'
    # Text to text: the inputs of an example, with slots for fields of a record, as in
    # 'question: {question} context: {context}'. {answers/text/0} is the first text of a list within a
    # field. The slot of a class label of data.tfds gives its number, not its name.
    config.data.inputs = ''
    # Text to text: the targets, as in '{answer}'. '' trains data.task on documents.
    config.data.targets = ''
    # Text to text, instead of data.targets: a list of right answers, as '{answers/text}', or a text. An
    # empty list stands for the empty answer. Each metric of data.metrics uses the best of them; training
    # uses one (data.target_choice).
    config.data.references = ''
    # Which of several references becomes the targets in training: the first, or a random one in each
    # epoch. It also applies to your own tasks with 'references'. Validation uses the first.
    config.data.target_choice = Setting('first', choices=('first', 'random'))
    # Text to text: the weight of an example, as in '{weight}': a number of 0 or more that multiplies the
    # loss of its tokens. loss.loss_normalizing_factor=NUM_REAL_TARGET_TOKENS divides by the sum of the
    # weights of all tokens. Validation losses are also weighted; task metrics are not.
    config.data.weight = ''
    # Task metrics of data.targets, separated by commas: accuracy (the complete text is right), bleu,
    # rouge, and squad (exact match and F1 of words; an empty answer is right where the targets are
    # empty, as in SQuAD 2.0). bleu and rouge split words as in T5, bleu:NAME and rouge:NAME with a
    # tokenizer of sacrebleu: bleu:zh, bleu:ja-mecab, rouge:char.
    # infer_eval.every_steps or --mode=evaluate computes them.
    config.data.metrics = ''
    # True accepts empty targets, such as for a question without an answer: they become EOS.
    # False treats a record with empty targets as a bad line.
    config.data.allow_empty_targets = False
    # What to do with a line that cannot be read: stop the run, or skip the line.
    config.data.on_bad_line = Setting('stop', choices=('stop', 'skip'))
    # Largest fraction of the lines that may be skipped.
    config.data.max_bad_fraction = Setting(0.01, FRACTION)
    # A SentencePiece model, a folder that holds one (a run or a checkpoint), hf://ORG/NAME, or bytes.
    # '' trains a model.
    config.data.vocabulary = ''
    # Pieces of a trained vocabulary, without the sentinels.
    config.data.num_pieces = Setting(32000, Range(1, 1_000_000))
    # Sentinels: the ids that replace noise spans. A SentencePiece model with pieces <extra_id_N> has its
    # own, whatever this number.
    config.data.extra_ids = Setting(100, Range(0, 100_000))
    # Pieces of the vocabulary to use as sentinels, numbered from 0, as '<unused{}>'. '' uses <extra_id_N>.
    config.data.sentinels = ''
    # Tokens to add after all ids of the vocabulary, which are never split, such as ('<sep>', '<cls>'); the
    # name of a .txt file stands for its lines. If model.vocab_size is above the rows of restore.path, the
    # new rows start at the mean of the others.
    config.data.added_tokens = ()
    # Tokens per row of a batch.
    config.data.lengths = ConfigDict()
    # Tokens of the inputs of each row.
    config.data.lengths.inputs = Setting(512, SIZE)
    # Tokens of the targets of each row.
    config.data.lengths.targets = Setting(114, SIZE)
    # How examples are packed into rows: tightly, greedily (as in SeqIO), or no.
    config.data.pack = Setting('tightly', choices=('no', 'greedily', 'tightly'))
    # Whether documents are concatenated before they are cut into rows: yes, no, or auto, as in T5: yes for
    # all objectives except prefix_lm, deshuffling and principle_sentences.
    config.data.concatenate = Setting('auto', choices=('auto', 'yes', 'no'))
    # Fraction of the tokens that is noise, for span corruption and for noise drawn token by token.
    config.data.noise_density = Setting(0.15, Range(0, 1, without=(0, 1)))
    # Mean number of tokens of a noise span, for span corruption.
    config.data.mean_noise_span_length = Setting(3.0, SIZE)
    # The choice of target sentences, for principle_sentences. The defaults are LongT5's.
    config.data.sentences = ConfigDict()
    # Largest share of a text's sentences.
    config.data.sentences.ratio = Setting(0.2, FRACTION)
    # Smallest share, as a fraction of data.sentences.ratio. A text's share is drawn between the two.
    config.data.sentences.min_ratio = Setting(0.33, FRACTION)
    # Standard deviation of the random fraction by which a sentence's score changes.
    config.data.sentences.noise = Setting(0.04, FRACTION)
    # Probability that a sentence of the targets also stays in the inputs.
    config.data.sentences.kept = Setting(0.1, FRACTION)
    # Processes that make batches ahead of training, each some of the rows, without changing the batches.
    # 0 makes them in a thread of the training process.
    config.data.num_workers = Setting(0, Range(0, 1024))
    # Fraction of the documents held out for validation, chosen by a hash of their text.
    config.data.validation_fraction = Setting(0.01, BELOW_ONE)

    # The loss.
    config.loss = ConfigDict()
    # Weight of the penalty log(Z)^2, which keeps the logits small.
    config.loss.z_loss = Setting(1e-4, NOT_NEGATIVE)
    # Probability spread over all tokens except the target.
    config.loss.label_smoothing = Setting(0.0, BELOW_ONE)
    # Divisor of the summed loss: '' (no division), a number, NUM_REAL_TARGET_TOKENS,
    # NUM_TOTAL_TARGET_TOKENS or AVERAGE_PER_SEQUENCE.
    config.loss.loss_normalizing_factor = ''
    # A Python file of your own, as a path or as its name in the current folder, with a function
    # weighted_sums in the form of loss.py's: examples/preferences/preferences.py. '' for T5's loss.
    config.loss.module = ''
    # The settings of that file, --config.loss.options.NAME=VALUE: the fields of its frozen dataclass
    # Options. --help --config.loss.module=FILE lists them.
    config.loss.options = ConfigDict()

    # The optimizer. All settings are Adafactor's, except trainable, the clip of the gradient, the
    # average of the parameters and adamw.
    config.optimizer = ConfigDict()
    # adafactor, adamw, or muon: Muon for the kernels of layers and AdamW for all other parameters.
    config.optimizer.name = 'adafactor'
    # Exponent of the decay of second moments: 1 - step^-decay_rate.
    config.optimizer.decay_rate = Setting(0.8, FRACTION)
    # Step from which that decay counts.
    config.optimizer.step_offset = Setting(0, STEPS_OR_NONE)
    # True scales an update by the root mean square of its parameter.
    config.optimizer.multiply_by_parameter_scale = True
    # Largest root mean square of an update. 0 for no limit.
    config.optimizer.clipping_threshold = Setting(1.0, NOT_NEGATIVE)
    # True stores large second moments as row and column means.
    config.optimizer.factored = True
    # Decay of the momentum. 0 for no momentum.
    config.optimizer.beta1 = Setting(0.0, BELOW_ONE)
    # Fraction of each parameter that decays per step, not multiplied by the learning rate. 0 for
    # none.
    config.optimizer.weight_decay_rate = Setting(0.0, FRACTION)
    # Regular expression of the paths, as in model-info.txt, of the parameters to train; the others are
    # frozen: '(?!encoder/).+' freezes the encoder; 'decoder/.+' also freezes the embedding, which saves
    # the entire backward pass of the encoder. '' trains all parameters, or with model.lora_rank only the
    # adapters. For any optimizer.
    config.optimizer.trainable = ''
    # Largest global norm of the gradient; 0 for no limit. For any optimizer.
    config.optimizer.global_norm_clip_threshold = Setting(0.0, NOT_NEGATIVE)
    # Decay of an exponential moving average of the parameters, such as 0.999. Validation losses, task
    # metrics and infer.load use the average. 0 for none. For any optimizer.
    config.optimizer.ema_decay = Setting(0.0, BELOW_ONE)
    # AdamW, also as part of muon. Muon shares the parameter's scale and the weight decay.
    config.optimizer.adamw = ConfigDict()
    # Decay of the first moments.
    config.optimizer.adamw.beta1 = Setting(0.9, BELOW_ONE)
    # Decay of the second moments.
    config.optimizer.adamw.beta2 = Setting(0.999, BELOW_ONE)
    # Fraction of a parameter that decays per step, times the learning rate; 0 for none.
    config.optimizer.adamw.weight_decay = Setting(0.0001, FRACTION)
    # False leaves the scales of norms and the relative position biases out of this decay.
    config.optimizer.adamw.decay_norms = True
    # True scales an update by the root mean square of its parameter, at least 1e-3 (nanoT5). Use Adafactor's
    # learning rates, such as 0.02.
    config.optimizer.adamw.multiply_by_parameter_scale = False
    # Added to the root of the second moments.
    config.optimizer.adamw.epsilon = Setting(1e-8, NOT_NEGATIVE)

    # The learning rate: a product of factors, as in T5X.
    config.learning_rate = ConfigDict()
    # Any of constant, linear_warmup, linear_warmup_from_half (of the rate), linear_decay, rsqrt_decay,
    # rsqrt_normalized_decay, decay_every, cosine_decay.
    config.learning_rate.factors = 'constant * rsqrt_decay'
    # Value of the factor constant.
    config.learning_rate.base_learning_rate = Setting(1.0, POSITIVE)
    # Steps of the warm-up.
    config.learning_rate.warmup_steps = Setting(10_000, STEPS)
    # Multiplier of decay_every, slope of linear_decay.
    config.learning_rate.decay_factor = Setting(0.5, NOT_NEGATIVE)
    # Steps between the decays of decay_every.
    config.learning_rate.steps_per_decay = Setting(20_000, STEPS)
    # Steps per cycle of cosine_decay.
    config.learning_rate.steps_per_cycle = Setting(100_000, STEPS)
    # Step from which the schedule counts.
    config.learning_rate.step_offset = Setting(0, STEPS_OR_NONE)
    # Smallest learning rate.
    config.learning_rate.min_learning_rate = Setting(1e-8, NOT_NEGATIVE)

    # Training.
    config.train = ConfigDict()
    # Step at which the run ends, including the steps of a checkpoint that it starts from.
    config.train.steps = Setting(100_000, STEPS)
    # Steps to take beyond the checkpoint that the run starts from, instead of train.steps. 0 for
    # train.steps.
    config.train.relative_steps = Setting(0, STEPS_OR_NONE)
    # Passes over the examples of a task, after which the run ends even before train.steps. 0 for no
    # limit.
    config.train.epochs = Setting(0, STEPS_OR_NONE)
    # Evaluations without a better save.best_metric after which the run ends. 0 for no limit.
    config.train.early_stopping = Setting(0, STEPS_OR_NONE)
    # What to do if the loss, gradient, update or optimizer state of a step is not finite: stop the run, or
    # skip the step, which leaves parameters and optimizer state unchanged.
    config.train.on_not_finite = Setting('stop', choices=('stop', 'skip'))
    # Number of such steps that a run may skip in total before it stops.
    config.train.max_not_finite = Setting(10, STEPS)
    # Whether to skip a spike, a step whose loss or gradient norm is far above its mean: no or skip.
    config.train.on_spike = Setting('no', choices=('no', 'skip'))
    # Standard deviations above the mean at which a spike begins.
    config.train.spike_sigma = Setting(6.0, POSITIVE)
    # Number of last steps, without skipped ones, for mean and deviation. The first spike may come after half
    # as many. The run stops after this many spikes in succession.
    config.train.spike_window = Setting(128, WINDOW)
    # Rows of the global batch, over all devices.
    config.train.batch_size = Setting(128, SIZE)
    # Microbatches per step: a number, or auto for as few as fit into memory.
    config.train.num_microbatches = 'auto'
    # Dtype in which devices sum the gradients of parameters split over mesh.fsdp: float32, or bfloat16,
    # which sends half the bytes.
    config.train.gradient_dtype = Setting('float32', choices=('float32', 'bfloat16'))

    # Validation.
    config.eval = ConfigDict()
    # Steps between evaluations. The last step is always evaluated.
    config.eval.every_steps = Setting(1000, STEPS)
    # Batches per evaluation, of each task.
    config.eval.steps = Setting(20, STEPS)

    # How answers are decoded. By default, each token is the most likely one.
    config.decode = ConfigDict()
    for name, setting in options.SETTINGS.items():
        config.decode[name] = setting
    config.decode.max_length = Setting(config.data.lengths.targets.default, SIZE)  # a row's
    # A Python file of your own, as a path or as its name in the current folder, with a function
    # filters(vocabulary) that returns a list of filters: see decode.py, `filtered`.
    config.decode.module = ''
    # Examples decoded or scored at once, if there are many.
    config.decode.batch_size = Setting(32, SIZE)

    # Task metrics: of the model's answers to the inputs of a split, or of its scores.
    config.infer_eval = ConfigDict()
    # Steps between them. The last step is always evaluated. 0 for none.
    config.infer_eval.every_steps = Setting(0, STEPS_OR_NONE)
    # Tasks and mixtures, separated by commas; a mixture stands for its tasks with metrics. '' is data.task.
    config.infer_eval.task = ''
    # Split: train, validation or test.
    config.infer_eval.split = Setting('validation', choices=('train', 'validation', 'test'))
    # Examples per batch. The choices of a ranked task count.
    config.infer_eval.batch_size = Setting(32, SIZE)
    # Number of examples of each task, from the first on; if choices are ranked, also all choices of the
    # last input. 0 for all.
    config.infer_eval.num_examples = Setting(0, STEPS_OR_NONE)

    # Metrics.
    config.log = ConfigDict()
    # Steps between lines of metrics.jsonl. The last step is always logged.
    config.log.every_steps = Setting(100, STEPS)

    # Checkpoints.
    config.save = ConfigDict()
    # Steps between checkpoints. The last step is always saved.
    config.save.every_steps = Setting(1000, STEPS)
    # Number of checkpoints to keep: the newest ones, or with best_metric the best ones and always the
    # newest. 0 for all.
    config.save.keep = Setting(0, STEPS_OR_NONE)
    # The metric that determines the best checkpoint, as in metrics.jsonl: RUN/NAME, such as
    # training_eval/TASK/loss or inference_eval/TASK/accuracy. '' for none.
    config.save.best_metric = ''
    # Which values of it are better: higher or lower.
    config.save.best_is = Setting('', choices=('higher', 'lower', ''))
    # Checkpoints at multiples of this step are never deleted. 0 for none.
    config.save.keep_every = Setting(0, STEPS_OR_NONE)
    # Dtype of saved parameters: float32 or bfloat16. A run that resumes restores these.
    config.save.dtype = Setting('float32', choices=('float32', 'bfloat16'))

    # The checkpoint that a new run starts from. A run that resumes restores its own newest
    # checkpoint.
    config.restore = ConfigDict()
    # Any checkpoint that infer.load opens, such as hf://google/flan-t5-small. '' for initial parameters.
    config.restore.path = ''
    # Regular expression of the paths to restore. 'target/.*' restores only the parameters and starts at
    # step 0.
    config.restore.only = '.*'
    # False restores the arrays that model and checkpoint share, and lists the others. True requires equal
    # trees.
    config.restore.strict = True
    # Dtype to which restored parameters are rounded: float32, bfloat16, float16, or '' for the stored
    # dtype.
    config.restore.dtype = Setting('float32', choices=('float32', 'bfloat16', 'float16', ''))
    # Dtype of parameters that are not trained (optimizer.trainable, model.lora_rank, prompts), in memory
    # and in checkpoints: bfloat16, or '' for float32.
    config.restore.frozen_dtype = Setting('', choices=('bfloat16', ''))

    # Devices per axis of the mesh. -1 takes the remaining devices. The batch is split over data * fsdp.
    config.mesh = ConfigDict()
    # Number of groups of devices over which only the batch is split: each group has all parameters.
    config.mesh.data = Setting(-1, DEVICES)
    # Number of devices that also split parameters and optimizer state. Parameters are gathered where they
    # are used: one layer at a time with model.remat and model.scan_layers.
    config.mesh.fsdp = Setting(1, DEVICES)
    # Number of devices over which heads, MLP and vocabulary are split.
    config.mesh.model = Setting(1, DEVICES)
    return config
