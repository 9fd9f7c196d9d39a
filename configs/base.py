"""Every setting, once, with its unit and default. Other configs start from here and change values.

The defaults are T5X's pretraining run (t5x/configs/runs/pretrain.gin) of T5 1.1 small. What values each setting
may have is in settings.py; `python main.py --help` prints all of it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Seed of all randomness: initialization, dropout, order of the data, noise.
    config.seed = 0

    # The transformer, under T5X's field names.
    config.model = ConfigDict()
    # Rows of the embedding: at least the number of ids in the vocabulary.
    config.model.vocab_size = 32128
    # Dtype of the computation, float32 or bfloat16. Parameters are float32.
    config.model.dtype = 'float32'
    # Width of the residual stream.
    config.model.emb_dim = 512
    # Attention heads of a layer.
    config.model.num_heads = 6
    # Layers of the encoder.
    config.model.num_encoder_layers = 8
    # Layers of the decoder.
    config.model.num_decoder_layers = 8
    # Width of one attention head.
    config.model.head_dim = 64
    # Width of the feed-forward layers.
    config.model.mlp_dim = 1024
    # Of relu, gelu, silu, swish and linear; the outputs of several are multiplied.
    config.model.mlp_activations = ('gelu', 'linear')
    # Fraction of activations that dropout sets to zero.
    config.model.dropout_rate = 0.0
    # True shares the table of the input and the output embeddings (T5 1.0).
    config.model.logits_via_embedding = False
    # True computes attention logits in float32 whatever the dtype.
    config.model.float32_attention_logits = False
    # True gives each layer its own relative position bias (umT5).
    config.model.relpos_bias_per_layer = False

    # Where examples come from.
    config.data = ConfigDict()
    # The task. c4_v220_span_corruption is span_corruption that warns where its text is not C4.
    config.data.task = 'span_corruption'
    # Files, as globs separated by commas. A document is a line of text, or a JSON object on a line of a .json,
    # .jsonl or .ndjson file; each also gzipped (.gz). '' is pydoc, the English in this Python's documentation.
    config.data.files = ''
    # Files for validation, likewise. '' holds out validation_fraction of data.files.
    config.data.validation_files = ''
    # Field of a JSON object that holds the document.
    config.data.text_field = 'text'
    # What to do about a line that cannot be read: stop, or skip.
    config.data.on_bad_line = 'stop'
    # Largest fraction of lines that may be skipped.
    config.data.max_bad_fraction = 0.01
    # A SentencePiece model, a folder that holds one (a run's, a checkpoint's), or bytes. '' trains one.
    config.data.vocabulary = ''
    # Pieces of a vocabulary that is trained, not counting sentinels.
    config.data.num_pieces = 32000
    # Sentinels, which span corruption puts in place of noise.
    config.data.extra_ids = 100
    # Tokens of an example.
    config.data.lengths = ConfigDict()
    # Tokens of the inputs.
    config.data.lengths.inputs = 512
    # Tokens of the targets.
    config.data.lengths.targets = 114
    # Fraction of the tokens that span corruption replaces.
    config.data.noise_density = 0.15
    # Tokens of a noise span, on average.
    config.data.mean_noise_span_length = 3.0
    # Fraction of the documents held out for validation, chosen by a hash of their text.
    config.data.validation_fraction = 0.01

    # The loss.
    config.loss = ConfigDict()
    # Weight of log(Z)^2, which keeps the logits small.
    config.loss.z_loss = 1e-4
    # Probability that is spread over all tokens.
    config.loss.label_smoothing = 0.0
    # '' (sum over tokens), a number, NUM_REAL_TARGET_TOKENS, NUM_TOTAL_TARGET_TOKENS or AVERAGE_PER_SEQUENCE.
    config.loss.loss_normalizing_factor = ''

    # The optimizer. What follows is Adafactor's, but for the clip of the gradient and adamw.
    config.optimizer = ConfigDict()
    # adafactor, or adamw.
    config.optimizer.name = 'adafactor'
    # Exponent of the decay of second moments: 1 - step^-decay_rate.
    config.optimizer.decay_rate = 0.8
    # Step at which that decay begins anew.
    config.optimizer.step_offset = 0
    # True scales an update by the root mean square of its parameter.
    config.optimizer.multiply_by_parameter_scale = True
    # Largest root mean square of an update; 0 for none.
    config.optimizer.clipping_threshold = 1.0
    # True keeps row and column means of large second moments.
    config.optimizer.factored = True
    # Momentum; 0 for none.
    config.optimizer.beta1 = 0.0
    # Fraction of a parameter that decays per step, not times the learning rate; 0 for none.
    config.optimizer.weight_decay_rate = 0.0
    # Largest norm of the whole gradient; 0 for none. Of any optimizer.
    config.optimizer.global_norm_clip_threshold = 0.0
    # AdamW.
    config.optimizer.adamw = ConfigDict()
    # Decay of the first moments.
    config.optimizer.adamw.beta1 = 0.9
    # Decay of the second moments.
    config.optimizer.adamw.beta2 = 0.999
    # Fraction of a parameter that decays per step, times the learning rate; 0 for none.
    config.optimizer.adamw.weight_decay = 0.0001

    # The learning rate: T5X's product of factors.
    config.learning_rate = ConfigDict()
    # Of constant, linear_warmup, linear_decay, rsqrt_decay, rsqrt_normalized_decay, decay_every, cosine_decay.
    config.learning_rate.factors = 'constant * rsqrt_decay'
    # The constant.
    config.learning_rate.base_learning_rate = 1.0
    # Steps of the warm-up.
    config.learning_rate.warmup_steps = 10_000
    # Factor of decay_every, slope of linear_decay.
    config.learning_rate.decay_factor = 0.5
    # Steps between two decays of decay_every.
    config.learning_rate.steps_per_decay = 20_000
    # Steps of a cycle of cosine_decay.
    config.learning_rate.steps_per_cycle = 100_000
    # Step at which the schedule begins.
    config.learning_rate.step_offset = 0
    # The rate never falls below.
    config.learning_rate.min_learning_rate = 1e-8

    # Training.
    config.train = ConfigDict()
    # Steps of the run.
    config.train.steps = 100_000
    # Rows of the global batch.
    config.train.batch_size = 128
    # Parts that a step is computed in: a number, or auto for as few as fit into memory.
    config.train.num_microbatches = 'auto'

    # Validation.
    config.eval = ConfigDict()
    # Steps between two evaluations; the last step is always evaluated.
    config.eval.every_steps = 1000
    # Batches of an evaluation.
    config.eval.steps = 20

    # Metrics.
    config.log = ConfigDict()
    # Steps between two lines of metrics.jsonl.
    config.log.every_steps = 100

    # Checkpoints.
    config.save = ConfigDict()
    # Steps between two checkpoints; the last step is always saved.
    config.save.every_steps = 1000
    # Newest checkpoints that are kept; 0 for all.
    config.save.keep = 0
    # A checkpoint of a multiple of this step is never deleted; 0 for none.
    config.save.keep_every = 0
    # Dtype of saved parameters, float32 or bfloat16. A run that goes on starts from them.
    config.save.dtype = 'float32'

    # What a new run starts from. A run that goes on starts from its own checkpoint.
    config.restore = ConfigDict()
    # A checkpoint that evaluate.load opens; '' for initial parameters.
    config.restore.path = ''
    # Regular expression of the paths to restore. 'target/.*' is the parameters alone, at step 0.
    config.restore.only = '.*'
    # False leaves out, and lists, what only the model or only the checkpoint has.
    config.restore.strict = True
    # Dtype that restored parameters are rounded to: float32, bfloat16, float16, or '' for the stored one.
    config.restore.dtype = 'float32'

    # Devices on the axes of the mesh; -1 for those that are left.
    config.mesh = ConfigDict()
    # Devices that split the batch.
    config.mesh.data = -1
    # Devices that split the model.
    config.mesh.model = 1
    return config.lock()
