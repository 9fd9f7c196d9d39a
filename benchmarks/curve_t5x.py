"""T5X's loss at each step, which benchmarks/curve.py compares with ours. Runs in its own process, as train_t5x.py."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from train_t5x import make_trainer


def curve(
    checkout: str, sizes: dict[str, Any], learning_rate: dict[str, Any], inputs: str
) -> dict[str, Any]:
    """Return the loss per target token of each step, and of the validation batches after the last one.

    `inputs`: an .npz file of params/PATH, the initial parameters, and of train/NAME and validation/NAME,
    [batches, rows, length]. The others are as in `make_trainer`.
    """
    arrays = np.load(inputs)
    train = list(batches_of(arrays, 'train'))
    trainer = make_trainer(checkout, sizes, train[0], learning_rate, eval_names=('validation',))
    import flax.core  # late: make_trainer prepares the imports
    import flax.traverse_util

    params = {}
    for path, x in flax.traverse_util.flatten_dict(trainer.train_state.params, sep='/').items():
        params[path] = arrays[f'params/{path}']
        assert params[path].shape == x.shape, path
    assert sum(name.startswith('params/') for name in arrays) == len(params)
    tree = flax.traverse_util.unflatten_dict(params, sep='/')
    trainer.train_state = trainer.train_state.replace_params(flax.core.freeze(tree))
    trainer.compile_train(train[0])
    losses = []
    for i, batch in enumerate(train, start=1):
        metrics = trainer.train(iter([batch]), 1).result()
        losses.append(float(metrics['loss_per_nonpadding_target_token'].value))
        if i % 100 == 0:
            print(f'T5X: step {i:,} of {len(train):,}', file=sys.stderr, flush=True)
    metrics = trainer.eval({'validation': batches_of(arrays, 'validation')})['validation']
    validation = float(metrics['loss_per_nonpadding_target_token'].value)
    return {'losses': losses, 'validation_loss': validation}


def batches_of(arrays: Any, split: str) -> Iterator[dict[str, Any]]:
    """Yield the batches of a split."""
    features = {}
    for name in arrays:
        if name.startswith(f'{split}/'):
            features[name.removeprefix(f'{split}/')] = arrays[name]
    for i in range(len(features['decoder_target_tokens'])):
        yield {name: x[i] for name, x in features.items()}


if __name__ == '__main__':
    print(json.dumps(curve(**json.loads(sys.argv[1]))))
