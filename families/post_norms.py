"""T5 with a second norm after each attention and each MLP, before the residual connection, as in Gemma 2.

Source: Gemma 2 (Gemma Team 2024) §2, "post-norm and pre-norm".
"""

import dataclasses


def modules(family):
    """Return the family with norms after its blocks."""

    class Attention(family.parts.attention):
        def __call__(self, *args):
            y_bTD, cache = super().__call__(*args)
            return self.config.parts.norm(self.config, name='post_layer_norm')(y_bTD), cache

    class Mlp(family.parts.mlp):
        def __call__(self, x_bTD, rows_b, mask):
            y_bTD, aux = super().__call__(x_bTD, rows_b, mask)
            return self.config.parts.norm(self.config, name='post_layer_norm')(y_bTD), aux

    parts = dataclasses.replace(family.parts, attention=Attention, mlp=Mlp)
    return dataclasses.replace(family, parts=parts)
