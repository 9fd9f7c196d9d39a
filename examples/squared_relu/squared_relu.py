"""An own model: T5 with a squared ReLU, one more activation for model.mlp_activations.

`modules` gets the parts of T5, a model.Modules, and returns those of this model.

Source: So et al. 2021 (Primer) §4.1.
"""

import dataclasses

import jax
import jax.numpy as jnp


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def modules(default):
    activations = (*default.activations, ('squared_relu', squared_relu))
    return dataclasses.replace(default, activations=activations)
