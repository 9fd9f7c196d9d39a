"""Every setting, once, with its unit and default. Other configs start from here and change values.

The defaults are T5X's pretraining run (t5x/configs/runs/pretrain.gin) of T5 1.1 small.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # all randomness: initialization, dropout, data order, noise

    config.model = model = ConfigDict()  # T5X's field names
    model.vocab_size = 32128  # rows of the embedding; at least the vocabulary's size
    model.dtype = 'float32'  # of the computation: float32 or bfloat16; parameters are float32
    model.emb_dim = 512
    model.num_heads = 6
    model.num_encoder_layers = 8
    model.num_decoder_layers = 8
    model.head_dim = 64
    model.mlp_dim = 1024
    model.mlp_activations = (
        'gelu',
        'linear',
    )  # of relu, gelu, silu, linear; several are multiplied
    model.dropout_rate = 0.0
    model.logits_via_embedding = False  # True ties input and output embeddings (T5 1.0)
    model.float32_attention_logits = False
    model.relpos_bias_per_layer = False  # True in umT5

    config.data = data = ConfigDict()
    data.task = (
        'span_corruption'  # or c4_v220_span_corruption: the same, and it says so where C4 is not
    )
    # Globs, comma-separated: a document a line of text, or a JSON object a line in .json and .jsonl; each
    # also gzipped (.gz). '' for pydoc, the English in this Python's own documentation.
    data.files = ''
    data.validation_files = ''  # likewise; '' takes validation_fraction of `files`
    data.text_field = 'text'  # of a JSON object
    data.on_bad_line = 'stop'  # or skip
    data.max_bad_fraction = 0.01  # of the lines, that may be skipped
    data.vocabulary = ''  # a SentencePiece model, its folder, or 'bytes'; '' trains one
    data.num_pieces = 32000  # of a vocabulary that is trained, sentinels not counted
    data.extra_ids = 100  # sentinels
    data.lengths = ConfigDict({'inputs': 512, 'targets': 114})  # tokens
    data.noise_density = 0.15  # fraction of the tokens that is corrupted
    data.mean_noise_span_length = 3.0  # tokens
    data.validation_fraction = 0.01  # of the documents, chosen by a hash of their text

    config.loss = loss = ConfigDict()
    loss.z_loss = 1e-4  # times log(Z)^2
    loss.label_smoothing = 0.0
    loss.loss_normalizing_factor = ''  # '' (sum), a number, NUM_REAL_TARGET_TOKENS, ...

    config.optimizer = optimizer = ConfigDict()  # Adafactor
    optimizer.decay_rate = 0.8
    optimizer.step_offset = 0  # steps
    optimizer.multiply_by_parameter_scale = True
    optimizer.clipping_threshold = 1.0  # of an update's root mean square; 0 for none
    optimizer.factored = True
    optimizer.beta1 = 0.0  # momentum; 0 for none
    optimizer.weight_decay_rate = 0.0  # per step, not times the learning rate; 0 for none
    optimizer.global_norm_clip_threshold = 0.0  # of the gradient; 0 for none

    config.learning_rate = rate = ConfigDict()  # T5X's product of factors
    rate.factors = 'constant * rsqrt_decay'
    rate.base_learning_rate = 1.0
    rate.warmup_steps = 10_000
    rate.decay_factor = 0.5  # of decay_every and linear_decay
    rate.steps_per_decay = 20_000  # of decay_every
    rate.steps_per_cycle = 100_000  # of cosine_decay
    rate.step_offset = 0  # steps
    rate.min_learning_rate = 1e-8

    config.train = train = ConfigDict()
    train.steps = 100_000
    train.batch_size = 128  # rows of the global batch
    train.num_microbatches = (
        'auto'  # parts of a step, to fit its memory; '4', or auto: as few as fit
    )

    config.eval = ConfigDict({'every_steps': 1000, 'steps': 20})  # batches of the validation split
    config.log = ConfigDict({'every_steps': 100})

    config.save = save = ConfigDict()
    save.every_steps = 1000  # the last step is always saved
    save.keep = 0  # newest checkpoints; 0: all
    save.keep_every = 0  # steps whose checkpoint is never deleted; 0: none
    save.dtype = 'float32'  # of the parameters; bfloat16 halves them, and going on starts from them

    config.restore = restore = ConfigDict()  # what a new run starts from; one that goes on does not
    restore.path = ''  # whatever evaluate.load opens; '' for initial parameters
    restore.only = '.*'  # pattern for whole paths: 'target/.*' is the parameters, at step 0
    restore.strict = True  # False: what only one of the two has is left as it is, and listed
    restore.dtype = 'float32'  # to which parameters are rounded; bfloat16, float16; '': as stored

    config.mesh = ConfigDict({'data': -1, 'model': 1})  # devices on each axis; -1: what is left
    return config.lock()
