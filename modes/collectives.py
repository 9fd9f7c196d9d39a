"""The collectives of a compiled program: what moves, over which axes of the mesh, how often.

XLA's own counts include the body of a loop once. This file follows the text of the optimized program
as it runs, and counts the body in each iteration.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

import partition

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')

# A collective that a TPU hides behind other work is in the computations of three fusions: the start,
# one with that work, and 'async-collective-done'. Only the first is counted.
ASYNC_START = 'async-collective-start'


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    type: str  # result type, such as 'f32[8,128]{1,0}', or several in parentheses
    opcode: str
    operands: list[str]  # their names
    text: str  # the operands and the rest of the line


Computation = dict[str, Instruction]


class Collective(NamedTuple):
    """Arrays that a step moves in the same way."""

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # axes of the mesh; 'others' if the groups of devices follow none
    num_bytes: int  # the size of an all-gather's result, of any other collective's operand
    is_async: bool  # other work may run between its start and its end
    times: int  # moves per step


def collectives_of(text: str, mesh: Mesh) -> list[Collective]:
    """Return the collectives of a step, from its optimized program as XLA prints it."""
    counts: dict[Collective, int] = {}
    for instruction, computation, times in executed(text):
        kind = instruction.opcode.removesuffix('-start')
        axes = axes_of(instruction.text, mesh) if kind in KINDS else ()
        if not axes:
            continue
        is_start = instruction.opcode.endswith('-start')
        # GPU programs also write synchronous collectives as a start.
        is_async = is_start and '"is_sync":true' not in instruction.text
        for name in instruction.operands:
            num_bytes = size_of(computation[name].type)
            if kind == 'all-gather':
                num_bytes *= math.prod(mesh.shape.get(axis, 1) for axis in axes)
            collective = Collective(kind, axes, num_bytes, is_async, times=0)
            counts[collective] = counts.get(collective, 0) + times
    return [collective._replace(times=times) for collective, times in counts.items()]


def executed(text: str) -> Iterator[tuple[Instruction, Computation, int]]:
    """Yield the instructions of a step, the computation of each, and how often a step runs it."""
    computations, entry = parse(text)

    def visit(name: str, times: int) -> Iterator[tuple[Instruction, Computation, int]]:
        for instruction in computations[name].values():
            yield instruction, computations[name], times
            if instruction.opcode == 'while':
                condition = called(instruction, 'condition')
                body = called(instruction, 'body')
                turns = num_turns(instruction, computations[condition])
                yield from visit(body, times * turns)
            elif instruction.opcode == 'call':
                callee = called(instruction, 'to_apply')
                yield from visit(callee, times)
            elif instruction.name.startswith(ASYNC_START):
                callee = called(instruction, 'calls')
                for hidden in computations[callee].values():
                    started = hidden._replace(opcode=f'{hidden.opcode}-start')
                    yield started, computations[callee], times

    yield from visit(entry, 1)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a program by name, and the name of its entry."""
    computations: dict[str, Computation] = {}
    entry = ''
    for line in text.splitlines():
        header = re.match(r'(ENTRY )?%?([\w.-]+) \(.*\{$', line)
        if header:
            current = computations.setdefault(header[2], {})
            if header[1]:
                entry = header[2]
        match = re.match(r'\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)', line)
        if match:
            name, result, opcode, tail = match.groups()
            operands = re.findall(r'%([\w.-]+)', tail.split('), ')[0])
            current[name] = Instruction(name, result, opcode, operands, tail)
    return computations, entry


def called(instruction: Instruction, attribute: str) -> str:
    """Return the computation that an attribute of an instruction names."""
    [name] = re.findall(rf'\b{attribute}=%?([\w.-]+)', instruction.text)
    return name


def num_turns(loop: Instruction, condition: Computation) -> int:
    """Return the iterations of a loop: XLA's own note or, on a TPU, the constant of its condition."""
    note = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text)
    if note:
        return int(note[1])
    constants = [x.text for x in condition.values() if x.opcode == 'constant']
    assert len(constants) == 1, f'a loop without a constant bound: {condition}'
    return int(constants[0].split(')')[0])


def axes_of(text: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which a collective moves data; () if it moves none."""
    pairs = re.search(r'source_target_pairs=\{(.*?)\}\}', text)
    if pairs:
        groups = np.array(numbers(pairs[1])).reshape(-1, 2)
    else:
        groups = groups_of(text, mesh.size)
    coordinates = np.array(np.unravel_index(groups, mesh.devices.shape))  # [axis, group, device]
    is_along = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    axes = tuple(mesh.axis_names[i] for i in np.flatnonzero(is_along))
    # A group has all the devices along its axes.
    if not pairs and groups.shape[1] != partition.axes_size(mesh, axes):
        return ('others',)
    return axes


def groups_of(text: str, num_devices: int) -> np.ndarray:
    """Return the devices of each of a collective's groups, [group, device]. XLA prints one of three forms.

    {{0,2},{1,3}} is a list, and {} one group of all; [2,2]<=[2,2]T(1,0) are the rows of an array of all
    devices; mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'} are the groups along an axis of the array.
    """
    rows = re.search(r'replica_groups=\[([\d,]+)\]<=(\S+)', text)
    if rows:
        return arrange(rows[2]).reshape(numbers(rows[1]))
    axes = re.search(r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}', text)
    if axes:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes[1])}
        devices = arrange(axes[2] or f'[{num_devices}]').reshape(list(sizes.values()))
        names = re.findall(r"'(\w+)'", axes[3])
        dims = [list(sizes).index(name) for name in names]
        last = np.moveaxis(devices, dims, range(-len(dims), 0))
        return last.reshape(-1, math.prod(sizes[name] for name in names))
    groups = re.search(r'replica_groups=\{(.*?\})?\}', text)
    assert groups, text
    if not groups[1]:
        return np.arange(num_devices)[None]
    return np.array([numbers(group) for group in groups[1].split('},')])


def arrange(text: str) -> np.ndarray:
    """Return the devices 0, 1, ... as XLA prints their order, '[2,4]T(1,0)': reshaped, transposed."""
    shape, _, order = text.partition('T')
    devices = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return devices.transpose(numbers(order)) if order else devices


def numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r'\d+', text)))


def size_of(type: str) -> int:
    """Return the bytes of an array, or of several in parentheses: 'f32[8,128]{1,0}'."""
    total = 0
    for dtype, shape in re.findall(r'(\w+)\[([\d,]*)\]', type):
        bits = re.search(r'\d+', dtype)
        total += math.prod(numbers(shape)) * (int(bits[0]) if bits else 8)  # pred is a byte
    return total // 8
