"""What tests of several devices share: functions run per device, groups of ranks, pairwise cases, a
stand-in for the ragged transport.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from oracles import bits

from kimi_jax.parallel.mesh import DATA, MODEL, make_mesh

BOTH = (DATA, MODEL)


def per_device(f, data, model):
    """f on every device of a mesh; what it takes and gives leads with the device, data-major."""
    spec = PartitionSpec(BOTH)

    def inside(*inputs):
        inputs = jax.tree.map(lambda x: x[0], inputs)
        return jax.tree.map(lambda x: x[None], f(*inputs))

    mesh = make_mesh(data, model)
    return jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def groups(data, model, axis):
    """The devices that exchange with each other along an axis, each group in rank order."""
    devices = np.arange(data * model).reshape(data, model)
    return {MODEL: devices, DATA: devices.T, BOTH: devices.reshape(1, -1)}[axis]


def same_bits(actual, expected):
    np.testing.assert_array_equal(bits(actual), bits(expected))


def stand_in(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups=None,
):
    """`jax.lax.ragged_all_to_all` by its documentation, out of `all_gather`.

    Where the caller breaks a rule (sizes that sender and receiver see differently, a slice that
    leaves its buffer, two at one place), all of the result has all bits set: NaN in any format.
    """
    assert axis_index_groups is None and operand.shape[1:] == output.shape[1:]
    assert operand.dtype == output.dtype
    for numbers in (input_offsets, send_sizes, output_offsets, recv_sizes):
        assert numbers.dtype == jnp.int32 and numbers.shape == input_offsets.shape
    every = lambda x: jax.lax.all_gather(x, axis_name)  # noqa: E731
    n, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    each, rest = divmod(len(send_sizes), n)
    assert not rest
    # What the sources say of their slices for me, and for each place which slice lands there.
    begins, sizes, landings = (
        every(x).reshape(n, n, each)[:, me].reshape(-1)
        for x in (input_offsets, send_sizes, output_offsets)
    )
    fits = (sizes == recv_sizes) & (sizes >= 0) & (begins >= 0) & (landings >= 0)
    fits &= (begins + sizes <= operand.shape[0]) & (landings + sizes <= output.shape[0])
    offsets = jnp.arange(output.shape[0], dtype=jnp.int32)[None] - landings[:, None]
    hit = (offsets >= 0) & (offsets < sizes[:, None])
    one, landed = hit.argmax(0).astype(jnp.int32), hit.any(0)
    row = begins[one] + jnp.take_along_axis(offsets, one[None], 0)[0]
    rows = every(operand)[one // each, jnp.where(landed, row, 0)]
    result = jnp.where(landed.reshape(-1, *[1] * (rows.ndim - 1)), rows, output)
    fits = fits.all() & (hit.sum(0) <= 1).all()
    size = result.dtype.itemsize
    words = jax.lax.bitcast_convert_type(result, jnp.dtype(f"uint{8 * size}"))
    words = jnp.where(fits, words, ~jnp.zeros_like(words))
    return jax.lax.bitcast_convert_type(words, result.dtype)


C, X = 3, 2


def loads(n):
    """Counts with something extreme each."""
    numbers = np.arange(n)
    yield "nothing", np.zeros((n, n), int)
    yield "all full", np.full((n, n), C)
    yield "everyone to itself", C * np.eye(n, dtype=int)
    yield "asymmetric", (numbers[:, None] + 2 * numbers) % (C + 1)
    yield "only upwards", np.triu(np.full((n, n), 2), 1)
    yield "one receives all", np.where(numbers == n - 1, C, 0) * np.ones((n, 1), int)
    yield "one sends all", (np.where(numbers == n // 2, C, 0) * np.ones((n, 1), int)).T
    yield "some without", np.where((numbers % 2 == 0)[:, None] & (numbers % 3 != 0), 2, 0)
    yield "a single row", np.eye(n, k=1 - n, dtype=int)


def every_pair(factors):
    """Few cases in which any two values of two factors meet: always one with most new pairs."""
    sizes = [range(len(values)) for values in factors]
    every = list(itertools.product(*sizes))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in every}
    missing = set().union(*pairs.values())
    while missing:
        best = max(every, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        yield tuple(values[i] for values, i in zip(factors, best, strict=True))
