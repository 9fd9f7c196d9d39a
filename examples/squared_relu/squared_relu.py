"""An own model: T5 with a squared ReLU, one activation more for model.mlp_activations.

`change` receives a copy of model.py, of which it may set any name: a table as here, a function such
as `model.relative_position_bucket`, or a module:

    class Mlp(model.Mlp):
        def __call__(self, x_bTD, rows_b=None): ...

    model.Mlp = Mlp

A parameter that you add needs a row in `model.PARAMETER_SPECS`.

Source: So et al. 2021 (Primer) §4.1.
"""

import jax
import jax.numpy as jnp


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def change(model):
    model.ACTIVATIONS['squared_relu'] = squared_relu
