"""Switch Transformer: T5 with many MLPs in some layers, one for each token.

In the last of every `sparse_step` layers, a router sends each token to an expert, an MLP, and multiplies the output by
the expert's probability. An expert has places for a limited number of tokens of a group. A token without a place is
dropped: only the residual connection carries it. An auxiliary loss balances the load of the experts.

The letters are model.py's, and t the tokens of this device, n groups of tokens, E experts, e the experts of this device
with P places each, and S all places, expert by expert.

Source: Fedus et al. 2022 (Switch Transformers) §2; flaxformer architectures/moe/{routing,moe_layers}.py.
"""

import dataclasses
import math

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import model
import partition
from configs import base, check
from family import t5_flops
from messages import Refused


def option(default, text):
    return dataclasses.field(default=default, metadata={'help': text})


@dataclasses.dataclass(frozen=True)
class Options:
    num_experts: int = 8
    sparse_step: int = option(2, 'One layer of this many, the last, has experts.')
    split_experts: str = option('model', 'A mesh axis: model or fsdp.')
    group_size: int = option(0, 'Maximum tokens of a group; 0: a row.')
    train_expert_capacity_factor: float = 1.25
    eval_expert_capacity_factor: float = 2.0
    min_expert_capacity: int = option(4, 'Minimum places for a group.')
    zero_padding: bool = option(True, 'Padding goes to expert 0, as in T5X.')
    expert_dropout_rate: float = option(-1.0, '-1: model.dropout_rate.')
    aux_loss_factor: float = option(0.01, 'Weight of the load balance loss.')
    router_z_loss_factor: float = 0.0

    def __post_init__(self):
        least = {'num_experts': 1, 'sparse_step': 1, 'group_size': 0, 'min_expert_capacity': 1}
        for name, low in least.items():
            limits = base.Range(low, 1 << 24)
            default = getattr(Options, name)
            check.check_allowed(f'model.options.{name}', getattr(self, name), default, limits)
        rate = self.expert_dropout_rate
        check.check_allowed('model.options.expert_dropout_rate', rate, -1.0, base.Range(-1, 0.99))
        axes = ('model', 'fsdp')
        check.check_allowed('model.options.split_experts', self.split_experts, 'model', None, axes)


def embed(c, tokens_bT, table_vD):
    """Return the embedded tokens, float32: this makes the residual stream float32."""
    return model.embed(c, tokens_bT, table_vD).astype(jnp.float32)


class Mlp(model.Mlp):
    """T5's MLP, or a router and experts."""

    def __call__(self, x_bTD, rows_b, mask):
        """Return y_bTD, float32 if experts computed it, and aux. Without a mask no token is dropped."""
        c = self.config
        o = c.options
        if (self.index + 1) % o.sparse_step:
            return super().__call__(x_bTD, rows_b, mask)
        num_rows, length, _ = x_bTD.shape
        size = capacity = num_rows * length
        if mask is not None:
            # All groups have the same size, as close to group_size as parts of a row or several rows can be.
            size = max(x for x in range(1, (o.group_size or length) + 1) if length % x == 0)
            if o.group_size > length:
                size = length * math.gcd(num_rows, o.group_size // length)
            factor = o.train_expert_capacity_factor
            if rows_b is None:
                factor = o.eval_expert_capacity_factor
            capacity = max(round(factor * size / o.num_experts), o.min_expert_capacity)
            if o.zero_padding:
                x_bTD = x_bTD * mask.dense().any(axis=(1, 3))[..., None]

        # The router, in float32 and without adapters.
        with hk.name_scope('router'), hk.name_scope('router_weights'):
            initializer = hk.initializers.RandomNormal(0.02)
            router = model.Kernel(c, (c.emb_dim, o.num_experts), initializer, 'float32', name='w')
            logits_ntE = router('bTD,DE->bTE', x_bTD.astype(jnp.float32))
        logits_ntE = logits_ntE.reshape(-1, size, o.num_experts)
        probs_ntE = jax.nn.softmax(logits_ntE)
        expert_nt = jnp.argmax(probs_ntE, axis=-1)
        prob_nt = jnp.take_along_axis(probs_ntE, expert_nt[..., None], axis=-1)[..., 0]

        # The tokens of a group take an expert's places in their order.
        is_chosen_ntE = jax.nn.one_hot(expert_nt, o.num_experts, dtype=jnp.int32)
        place_nt = (jnp.cumsum(is_chosen_ntE, axis=1) * is_chosen_ntE).sum(axis=-1) - 1
        is_kept_nt = place_nt < capacity
        group_n1 = jnp.arange(len(place_nt))[:, None]
        place_nt += (expert_nt * len(place_nt) + group_n1) * min(capacity, size)
        num_places = len(place_nt) * min(capacity, size)
        place_nt = jnp.where(is_kept_nt, place_nt, o.num_experts * num_places)
        y_tD = self.pass_experts(x_bTD, place_nt.flatten(), num_places, rows_b)
        y_bTD = (y_tD * prob_nt.reshape(-1, 1)).reshape(x_bTD.shape)
        if mask is None:
            return y_bTD, {}

        # Metrics per group, which are averaged per row below.
        kept_n = is_kept_nt.mean(axis=1)
        load_nE = is_chosen_ntE.mean(axis=1)
        balance_n = o.num_experts * (load_nE * probs_ntE.mean(axis=1)).sum(axis=1)
        z_n = jnp.square(jax.nn.logsumexp(logits_ntE, axis=-1)).mean(axis=1)
        confidence = lax.stop_gradient(jnp.stack([(prob_nt * is_kept_nt).mean(), kept_n.mean()]))
        confidence = partition.psum(confidence, partition.BATCH_AXES)
        aux = {
            'auxiliary_loss': o.aux_loss_factor * balance_n,
            'router_z_loss': o.router_z_loss_factor * z_n,
            'fraction_tokens_left_behind': 1 - kept_n,
            'expert_usage': kept_n * size / (o.num_experts * capacity),
            'router_confidence': jnp.full_like(kept_n, confidence[0] / confidence[1]),
        }
        aux |= {f'load/{e}': load_nE[:, e] for e in range(min(o.num_experts, 32))}
        per_row = lambda x_n: jnp.repeat(x_n, size).reshape(num_rows, length).mean(axis=1)  # noqa: E731
        return y_bTD, {f'experts/{name}': per_row(x_n) for name, x_n in aux.items()}

    @hk.name_like('__call__')
    def pass_experts(self, x_bTD, place_t, num_places, rows_b):
        """Return y_tD, the output of each token's expert; 0 if its place is beyond the capacity."""
        c = self.config
        o = c.options
        is_on_fsdp = o.split_experts == 'fsdp'
        num_e = partition.split(o.num_experts, o.split_experts)
        width = partition.split(c.mlp_dim, 'model') if is_on_fsdp else c.mlp_dim
        token_S = jnp.full(o.num_experts * num_places, len(place_t))
        token_S = token_S.at[place_t].set(jnp.arange(len(place_t)), mode='drop')
        if not is_on_fsdp:
            token_S = partition.own_slice(token_S, 'model', dim=0)
            place_t = place_t - lax.axis_index('model') * len(token_S)

        def to_experts(x_t):  # arrange by place, and over 'fsdp' send to the experts' devices
            x_S = jnp.take(x_t, token_S, axis=0, mode='fill', fill_value=0)
            x_eP = x_S.reshape(-1, num_places, *x_t.shape[1:])
            return lax.all_to_all(x_eP, 'fsdp', 0, 1, tiled=True) if is_on_fsdp else x_eP

        def kernels(name, *shape):
            std = math.sqrt(0.1 / shape[0])
            init = lambda shape, _: std * jax.random.normal(hk.next_rng_key(), shape)  # noqa: E731
            with hk.name_scope(name):
                return hk.get_parameter('kernel', (num_e, *shape), c.dtype, init).astype(c.dtype)

        x_bTD = lax.pcast(x_bTD, 'model', to='varying')  # its gradient is a sum over 'model'
        x_ePD = to_experts(x_bTD.reshape(-1, c.emb_dim))
        gates = []
        with hk.name_scope('expert'):
            for i, activation in enumerate(c.mlp_activations):
                name = 'wi' if len(c.mlp_activations) == 1 else f'wi_{i}'
                wi_eDf = kernels(name, c.emb_dim, width)
                x_ePf = checkpoint_name(jnp.einsum('ePD,eDf->ePf', x_ePD, wi_eDf), 'projection')
                gates.append(dict(c.parts.activations)[activation](x_ePf))
            wo_efD = kernels('wo', width, c.emb_dim)
        hidden_ePf = math.prod(gates)
        if rows_b is not None:  # one mask for each row and expert
            expert_e = lax.axis_index(o.split_experts) * num_e + jnp.arange(num_e)
            rows_t = jnp.repeat(rows_b, x_bTD.shape[1])
            rows_eP = to_experts(rows_t) * o.num_experts + expert_e[:, None]
            rate = c.dropout_rate if o.expert_dropout_rate < 0 else o.expert_dropout_rate
            args = (rate, rows_eP.flatten(), (c.mlp_dim,), 1 if is_on_fsdp else None)
            hidden_ePf = model.dropout(hidden_ePf.reshape(-1, width), *args).reshape(x_ePf.shape)
        y_ePD = jnp.einsum('ePf,efD->ePD', hidden_ePf, wo_efD)
        if is_on_fsdp:
            y_ePD = lax.all_to_all(y_ePD, 'fsdp', 1, 0, tiled=True)
        y_SD = y_ePD.reshape(-1, c.emb_dim)
        place_t = jnp.where(place_t >= 0, place_t, len(y_SD))
        partial_tD = jnp.take(y_SD, place_t, axis=0, mode='fill', fill_value=0)
        # Sum over the devices' experts, or over their slices of the width.
        y_tD = partition.psum(partial_tD, 'model')
        return checkpoint_name(y_tD, 'sum')


def flops(c, S, T):
    """Return the FLOPs of a row's forward pass: T5's, because a token has one expert, and the router's."""
    num_routed = (S * c.num_encoder_layers + T * c.num_decoder_layers) // c.options.sparse_step
    return t5_flops(c, S, T) + 2 * num_routed * c.emb_dim * c.options.num_experts


def losses(c):
    """Return the weights of the experts' losses. Raises Refused if no layer has experts."""
    step = c.options.sparse_step
    if step > max(c.num_encoder_layers, c.num_decoder_layers):
        raise Refused(
            f'model.options.sparse_step={step}: no layer of {c.num_encoder_layers} + {c.num_decoder_layers} has '
            'experts: use at most the number of layers of a stack'
        )
    return {'experts/auxiliary_loss': 1.0, 'experts/router_z_loss': 1.0}


def modules(family):
    """Return Switch Transformer; its initial values have a tenth of T5's variance."""
    scaling = hk.initializers.VarianceScaling

    def check_mesh(c, mesh):
        family.check_mesh(c, mesh)
        axes = (c.options.split_experts,)
        partition.check_divides('model.options.num_experts', c.options.num_experts, axes, mesh)

    def on(model_spec, fsdp_spec):
        return lambda c: fsdp_spec if c.options.split_experts == 'fsdp' else model_spec

    parts = dataclasses.replace(
        family.parts,
        embedder=embed,
        mlp=Mlp,
        initializers=model.Initializers(
            attention=scaling(0.1, 'fan_in', 'normal'),
            mlp=scaling(0.1, 'fan_in', 'truncated_normal'),
            logits=scaling(0.1, 'fan_in', 'truncated_normal'),
            relpos_bias=scaling(0.1, 'fan_avg', 'uniform'),
        ),
    )
    return dataclasses.replace(
        family,
        parts=parts,
        check_mesh=check_mesh,
        specs=(
            *family.specs,  # and [embed, experts], [experts, embed, mlp], [experts, mlp, embed]
            (r'.+/router/router_weights/w/kernel', P(None, None)),
            (r'.+/expert/wi(_\d)?/kernel', on(P('model', 'fsdp', None), P('fsdp', None, 'model'))),
            (r'.+/expert/wo/kernel', on(P('model', None, 'fsdp'), P('fsdp', 'model', None))),
        ),
        split_in_use=on('', r'.+/mlp/expert/.+'),
        period=lambda c: c.options.sparse_step,
        losses=losses,
        flops=flops,
    )
