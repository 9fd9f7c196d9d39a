"""An own model: T5 with a squared ReLU, one more activation for model.mlp_activations.

`modules` gets T5, a family.Family, and returns this model.

Source: So et al. 2021 (Primer) §4.1.
"""

import dataclasses

import jax
import jax.numpy as jnp


def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


def modules(family):
    activations = (*family.parts.activations, ('squared_relu', squared_relu))
    parts = dataclasses.replace(family.parts, activations=activations)
    return dataclasses.replace(family, parts=parts)
