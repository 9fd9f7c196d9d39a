"""Switch Transformer: T5 with many MLPs in some layers, of which each token passes one.

In the last of every `sparse_step` layers a router chooses an expert, an MLP, for each token, and multiplies what it
returns by the expert's probability. An expert has places for some tokens of a group. A token that finds none
left is dropped: the residual connection alone carries it. A loss keeps the load of the experts balanced.

The letters are model.py's, and

    n  groups of tokens    t  tokens of a group    S  places, those of expert 0 first
    E  experts             e  those of this device

Source: Fedus et al. 2022 (Switch Transformers) §2; flaxformer architectures/moe/{routing,moe_layers}.py.
"""

import dataclasses
import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import model
import partition


def option(default, **metadata):
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    num_experts: int = option(8, range=(1, 1 << 16), axis='split_experts')
    sparse_step: int = option(2, range=(1, 1000), help='Layers per layer with experts.')
    split_experts: str = option(
        'model',
        choices=('model', 'fsdp'),
        help="Mesh axis of the experts. To 'fsdp' tokens travel.",
    )
    group_size: int = option(
        0,
        range=(0, 1 << 30),
        help='Tokens of a group: rows of a device, or a part of a row; 0: a row.',
    )
    train_expert_capacity_factor: float = option(
        1.25, range=(0.0, 1e6), help='Places of all experts for each token of a group.'
    )
    eval_expert_capacity_factor: float = option(2.0, range=(0.0, 1e6))
    min_expert_capacity: int = option(4, range=(1, 1 << 30), help='Least places of an expert.')
    zero_padding: bool = option(True, help='Route padding as zeros, as T5X does; expert 0 gets it.')
    expert_dropout_rate: float = option(-1.0, range=(-1, 0.99), help='-1: model.dropout_rate.')
    aux_loss_factor: float = option(0.01, range=(0.0, 1e6), help='Weight of the load balance.')
    router_z_loss_factor: float = option(0.0, range=(0.0, 1e6))


class Mlp(model.Mlp):
    """T5's MLP, or a router and experts."""

    def __call__(self, x_bTD, rows_b=None, mask_b1TT=None):
        """Return y_bTD, float32 if it is of experts, and aux. Without a mask no token is dropped."""
        c = self.config
        o = c.options
        if self.index % o.sparse_step != o.sparse_step - 1:
            return super().__call__(x_bTD, rows_b)
        num_rows, length, _ = x_bTD.shape
        if x_bTD.size == 0:
            return x_bTD.astype(jnp.float32), {}
        if mask_b1TT is None:
            size = capacity = num_rows * length
        else:
            if o.zero_padding:
                x_bTD = x_bTD * mask_b1TT.any(axis=(1, 3))[..., None]
            size = tokens_of_group(o.group_size, num_rows, length)
            is_training = rows_b is not None
            factor = (
                o.train_expert_capacity_factor if is_training else o.eval_expert_capacity_factor
            )
            capacity = max(round(factor * size / o.num_experts), o.min_expert_capacity)

        # The router, in float32. A token has the place after the earlier tokens of its group and expert.
        x_ntD = x_bTD.reshape(-1, size, c.emb_dim)
        with hk.name_scope('router'), hk.name_scope('router_weights'):
            shape = (c.emb_dim, o.num_experts)
            initializer = hk.initializers.RandomNormal(0.02)
            router = model.Kernel(c, shape, initializer, 'float32', name='w')
            logits_ntE = router('bTD,DE->bTE', x_ntD.astype(jnp.float32))
        probs_ntE = jax.nn.softmax(logits_ntE)
        expert_nt = jnp.argmax(probs_ntE, axis=-1)
        prob_nt = jnp.take_along_axis(probs_ntE, expert_nt[..., None], axis=-1)[..., 0]
        is_chosen_ntE = jax.nn.one_hot(expert_nt, o.num_experts, dtype=jnp.int32)
        place_nt = (jnp.cumsum(is_chosen_ntE, axis=1) * is_chosen_ntE).sum(axis=-1) - 1
        is_kept_nt = place_nt < capacity
        num_places = min(capacity, size)
        place_nt = jnp.where(
            is_kept_nt, expert_nt * num_places + place_nt, o.num_experts * num_places
        )
        y_ntD = self.pass_experts(x_ntD, place_nt, num_places, rows_b)
        y_bTD = (y_ntD * prob_nt[..., None]).reshape(x_bTD.shape)
        if mask_b1TT is None:
            return y_bTD, {}

        # What the layer reports of each group, and so of each row.
        kept_n = is_kept_nt.mean(axis=1)
        balance_n = o.num_experts * (is_chosen_ntE.mean(axis=1) * probs_ntE.mean(axis=1)).sum(
            axis=-1
        )
        z_n = jnp.square(jax.nn.logsumexp(logits_ntE, axis=-1)).mean(axis=1)
        probs_kept = jnp.stack([(prob_nt * is_kept_nt).mean(), kept_n.mean()])
        for axis in partition.BATCH_AXES:
            probs_kept = lax.psum(lax.stop_gradient(probs_kept), axis)
        aux = {
            'auxiliary_loss': o.aux_loss_factor * balance_n,
            'router_z_loss': o.router_z_loss_factor * z_n,
            'fraction_tokens_left_behind': 1 - kept_n,
            'expert_usage': kept_n * size / (o.num_experts * capacity),
            'router_confidence': jnp.full_like(kept_n, probs_kept[0] / probs_kept[1]),
        }
        repeats = num_rows * length // len(kept_n)
        for name, value_n in aux.items():
            aux[name] = jnp.repeat(value_n, repeats).reshape(num_rows, length).mean(axis=1)
        return y_bTD, {f'experts/{name}': value_b for name, value_b in aux.items()}

    @hk.name_like('__call__')
    def pass_experts(self, x_ntD, place_nt, num_places, rows_b):
        """Return y_ntD, what the expert of each token returns for it; 0 where the place is beyond all.

        Tokens are moved by their indices. Products with one-hot matrices take longer than the experts.
        """
        o = self.config.options
        num_groups, size, _ = x_ntD.shape
        token_nS = jnp.full((num_groups, o.num_experts * num_places), size)
        groups_n1 = jnp.arange(num_groups)[:, None]
        token_nS = token_nS.at[groups_n1, place_nt].set(jnp.arange(size)[None], mode='drop')
        x_ntD = lax.pcast(x_ntD, 'model', to='varying')  # its gradient is a sum over 'model'
        if o.split_experts == 'model':
            token_nS = partition.own_slice(token_nS, 'model', dim=1)
            place_nt = place_nt - lax.axis_index('model') * token_nS.shape[1]
        take = functools.partial(jnp.take_along_axis, axis=1, mode='fill', fill_value=0)
        x_nSD = take(x_ntD, token_nS[..., None])
        rows_nS = None
        if rows_b is not None:
            rows_nt = jnp.repeat(rows_b, x_ntD[..., 0].size // len(rows_b)).reshape(place_nt.shape)
            rows_nS = take(rows_nt, token_nS)
        y_nSD = self.experts(x_nSD, rows_nS, num_places)
        is_own_nt = (place_nt >= 0) & (place_nt < y_nSD.shape[1])
        partial_ntD = take(y_nSD, jnp.where(is_own_nt, place_nt, y_nSD.shape[1])[..., None])
        y_ntD = lax.psum(
            partial_ntD, 'model'
        )  # the sum over the split experts, or their split width
        return checkpoint_name(y_ntD, 'sum')

    @hk.name_like('__call__')
    def experts(self, x_nSD, rows_nS, num_places):
        """Return what each place's expert returns, [n, S, D]; where 'model' splits its width, a partial sum."""
        c = self.config
        o = c.options
        is_on_fsdp = o.split_experts == 'fsdp'
        num_experts = partition.split(o.num_experts, o.split_experts)
        width = partition.split(c.mlp_dim, 'model') if is_on_fsdp else c.mlp_dim

        def by_expert(x):  # and from the devices of 'fsdp' to that of the expert
            x = x.reshape(len(x), -1, num_places, *x.shape[2:]).swapaxes(0, 1)
            x = x.reshape(len(x), -1, *x.shape[3:])
            return lax.all_to_all(x, 'fsdp', 0, 1, tiled=True) if is_on_fsdp else x

        def kernels(name, *shape):
            with hk.name_scope(name):
                initializer = hk.initializers.RandomNormal(math.sqrt(0.1 / shape[0]))
                init = lambda shape, _: initializer(shape, jnp.float32)  # noqa: E731
                found = hk.get_parameter('kernel', (num_experts, *shape), c.dtype, init)
            return found.astype(c.dtype)

        x_eSD = by_expert(x_nSD)
        gates = []
        with hk.name_scope('expert'):
            for i, activation in enumerate(c.mlp_activations):
                name = 'wi' if len(c.mlp_activations) == 1 else f'wi_{i}'
                wi_eDf = kernels(name, c.emb_dim, width)
                x_eSf = checkpoint_name(jnp.einsum('eSD,eDf->eSf', x_eSD, wi_eDf), 'projection')
                gates.append(dict(c.modules.activations)[activation](x_eSf))
            wo_efD = kernels('wo', width, c.emb_dim)
        hidden_eSf = math.prod(gates)
        if rows_nS is not None:
            # A row has one mask for each expert, as it has one for T5's MLP.
            first = lax.axis_index(o.split_experts) * num_experts
            keys_eS = by_expert(rows_nS) * o.num_experts + first + jnp.arange(num_experts)[:, None]
            rate = c.dropout_rate if o.expert_dropout_rate < 0 else o.expert_dropout_rate
            hidden_sf = hidden_eSf.reshape(-1, width)
            split_dim = 1 if is_on_fsdp else None
            hidden_sf = model.dropout(hidden_sf, rate, keys_eS.flatten(), (c.mlp_dim,), split_dim)
            hidden_eSf = hidden_sf.reshape(hidden_eSf.shape)
        y_eSD = jnp.einsum('eSf,efD->eSD', hidden_eSf, wo_efD)
        if is_on_fsdp:
            y_eSD = lax.all_to_all(y_eSD, 'fsdp', 1, 0, tiled=True)
        y_enCD = y_eSD.reshape(len(y_eSD), len(x_nSD), num_places, c.emb_dim)
        return y_enCD.swapaxes(0, 1).reshape(x_nSD.shape)


def tokens_of_group(group_size, num_rows, length):
    """Return the largest size up to `group_size` of groups that are alike: rows, or parts of a row."""
    if group_size > length:
        return length * math.gcd(num_rows, group_size // length)
    sizes = range(1, (group_size or length) + 1)
    return max(size for size in sizes if length % size == 0)


def feed_forward(c, index, x_bTD, rows_b, mask_b1TT):
    """Return what model.feed_forward does. The MLP gets the mask."""
    y_bTD = c.modules.norm(c, name='pre_mlp_layer_norm')(x_bTD)
    y_bTD, aux = c.modules.mlp(c, index, name='mlp')(y_bTD, rows_b, mask_b1TT)
    return x_bTD + model.dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim)), aux


def modules(default):
    """Return the parts of Switch Transformer; its initial values have a tenth of T5's variance."""
    tenth = functools.partial(hk.initializers.VarianceScaling, 0.1)
    is_on_fsdp = lambda c: c.options.split_experts == 'fsdp'  # noqa: E731
    specs = (
        *default.specs,
        (r'.+/mlp/router/router_weights/w/kernel', P(None, None)),  # [embed, experts]
        (  # [experts, embed, mlp]
            r'.+/mlp/expert/wi(_\d)?/kernel',
            lambda c: P('fsdp', None, 'model') if is_on_fsdp(c) else P('model', 'fsdp', None),
        ),
        (  # [experts, mlp, embed]
            r'.+/mlp/expert/wo/kernel',
            lambda c: P('fsdp', 'model', None) if is_on_fsdp(c) else P('model', None, 'fsdp'),
        ),
    )
    return dataclasses.replace(
        default,
        mlp=Mlp,
        feed_forward=feed_forward,
        initializers=model.Initializers(
            attention=tenth('fan_in', 'normal'),
            mlp=tenth('fan_in', 'truncated_normal'),
            logits=tenth('fan_in', 'truncated_normal'),
            relpos_bias=tenth('fan_avg', 'uniform'),
        ),
        specs=specs,
        split_in_use=lambda c: r'.+/mlp/expert/.+' if is_on_fsdp(c) else '',
        period=lambda c: c.options.sparse_step,
        changes_dtype=True,
        losses=lambda c: {'experts/auxiliary_loss': 1.0, 'experts/router_z_loss': 1.0},
    )
