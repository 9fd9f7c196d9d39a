"""The train step of T5X, which benchmarks/train.py compares with ours.

Runs in a separate process, because T5X needs other packages: flax, Gin, SeqIO, CLU, TensorFlow.
"""

import importlib.util
import itertools
import json
import resource
import sys
import time
import types
from typing import Any

# Settings that its T5Config shares with ours.
SIZES = ('vocab_size', 'emb_dim', 'num_heads', 'head_dim', 'mlp_dim', 'mlp_activations')
SIZES += ('num_encoder_layers', 'num_decoder_layers', 'dropout_rate', 'dtype')


class Absent(types.ModuleType):
    """A stand-in for AirIO, which no package index has. T5X only checks for instances of its classes."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


def make_trainer(
    checkout: str,
    sizes: dict[str, Any],
    batch: dict[str, Any],
    learning_rate: dict[str, Any],
    eval_names: tuple[str, ...] = (),
) -> Any:
    """Return the Trainer of the T5X in the folder `checkout`, with the Adafactor of its recipes.

    `sizes`: settings of its T5Config; `batch`: an example of its batches; `learning_rate`: arguments of its
    scheduler.
    """
    sys.path.insert(0, checkout)
    if importlib.util.find_spec('airio') is None:
        airio = Absent('airio')
        airio.core = airio
        sys.modules |= {'airio': airio, 'airio.core': airio}
    import jax
    from absl import logging
    from jax.experimental import pjit

    logging.set_verbosity(logging.ERROR)  # it warns of every parameter
    # JEstimator 0.3.3, which T5X needs, looks for it there.
    pjit.PartitionSpec = jax.sharding.PartitionSpec
    from t5x import adafactor, models, partitioning, trainer, utils
    from t5x.examples.t5 import network

    optimizer = adafactor.Adafactor(
        decay_rate=0.8,
        step_offset=0,
        logical_factor_rules=adafactor.standard_logical_factor_rules(),
    )
    model = models.EncoderDecoderModel(
        module=network.Transformer(config=network.T5Config(**sizes)),
        input_vocabulary=None,
        output_vocabulary=None,
        optimizer_def=optimizer,
        z_loss=1e-4,
    )
    partitioner = partitioning.PjitPartitioner(
        num_partitions=1, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )
    initializer = utils.TrainStateInitializer(
        optimizer_def=optimizer,
        init_fn=model.get_initial_variables,
        input_shapes={name: x.shape for name, x in batch.items()},
        input_types={name: x.dtype for name, x in batch.items()},
        partitioner=partitioner,
    )
    return trainer.Trainer(
        model=model,
        train_state=initializer.from_scratch(jax.random.PRNGKey(0)),
        partitioner=partitioner,
        eval_names=eval_names,
        summary_dir=None,
        train_state_axes=initializer.train_state_axes,
        rng=jax.random.PRNGKey(0),
        learning_rate_fn=utils.create_learning_rate_scheduler(**learning_rate),
        num_microbatches=None,
    )


def measure(
    checkout: str,
    sizes: dict[str, Any],
    lengths: list[int],
    batch_size: int,
    num_warm_up_steps: int,
    num_steps: int,
) -> dict[str, Any]:
    """Return the seconds of a step, the number of parameters and the peak memory.

    `lengths`: of inputs and targets; the others are as in `make_trainer`.
    """
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    batch = {}
    for part, length in zip(('encoder', 'decoder'), lengths, strict=True):
        shape = (batch_size, length)
        batch[f'{part}_input_tokens'] = rng.integers(2, sizes['vocab_size'], shape, np.int32)
        batch[f'{part}_segment_ids'] = np.ones(shape, np.int32)
        batch[f'{part}_positions'] = np.tile(np.arange(length, dtype=np.int32), (batch_size, 1))
    batch['decoder_target_tokens'] = rng.integers(2, sizes['vocab_size'], shape, np.int32)
    batch['decoder_loss_weights'] = np.ones(shape, np.int32)
    trainer = make_trainer(checkout, sizes, batch, learning_rate={})
    num_parameters = sum(x.size for x in jax.tree.leaves(trainer.train_state.params))
    batches = itertools.repeat(batch)
    trainer.compile_train(batch)
    trainer.train(batches, num_warm_up_steps).result()
    jax.block_until_ready(trainer.train_state)
    start = time.perf_counter()
    metrics = trainer.train(batches, num_steps).result()
    jax.block_until_ready(trainer.train_state)
    seconds = time.perf_counter() - start
    assert np.isfinite(metrics['loss'].value)
    return {
        'seconds': seconds / num_steps,
        'num_parameters': num_parameters,
        'peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == '__main__':
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
