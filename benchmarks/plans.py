"""Plans for TPUs and GPUs, which are not needed: the table of docs/scaling.md.

    pip install -e '.[tpu,cuda]'
    python benchmarks/plans.py [--only=REGEX]

A row is a plan of main.py and takes 1 to 13 CPU minutes and up to 10 GB. --only selects rows by a regular expression
to find in their model and devices, joined by a space: --only='^XX?L h100'
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).resolve().parents[1]
ASYNCHRONOUS = '--xla_enable_async_all_reduce=true --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true'
FSDP = 'mesh.data=1 mesh.fsdp=-1 model.remat=full model.scan_layers=True'
ON_V5P = 'mesh.data=-1 mesh.fsdp=16 model.remat=dots model.scan_layers=True'
SWITCH = f'{FSDP} model.options.split_experts=fsdp'
SWITCH_256 = f'{SWITCH} mesh.data=2 mesh.fsdp=128'
ON_ONE = 'train.batch_size=64 train.num_microbatches=8 model.remat=full optimizer.name=adamw model.lora_rank=8'
LONG = f'{FSDP} data.lengths.inputs=16384 train.num_microbatches'
# The model, the devices, the file in configs/, its settings.
ROWS = (
    ('base', 'h100:8', 't5_1_1.py:base', f'{FSDP} train.batch_size=512'),
    ('XL', 'h100:8', 't5_1_1.py:xl', f'{FSDP} train.batch_size=512'),
    ('XXL', 'h100:8', 't5_1_1.py:xxl', f'{FSDP} train.batch_size=512'),
    ('XXL, LoRA', 'h100:1', 't5_1_1.py:xxl', ON_ONE),
    ('XXL, LoRA, bfloat16 base', 'h100:1', 't5_1_1.py:xxl', f'{ON_ONE} restore.frozen_dtype=bfloat16'),
    ('XL', 'v5e:8x8', 't5_1_1.py:xl', FSDP),
    ('XXL', 'v5e:16x16', 't5_1_1.py:xxl', FSDP),
    ('XXL', 'v5p:4x4x4', 't5_1_1.py:xxl', ON_V5P),
    ('Switch base_128', 'v5e:8x8', 'switch.py:base_128', SWITCH),
    ('Switch large_128', 'v5e:8x8', 'switch.py:large_128', SWITCH),
    ('Switch base_128, `mesh.data=2`', 'v5e:16x16', 'switch.py:base_128', SWITCH_256),
    ('Switch large_128, `mesh.data=2`', 'v5e:16x16', 'switch.py:large_128', SWITCH_256),
    ('Switch base_128', 'v5p:4x4x4', 'switch.py:base_128', SWITCH),
    ('Switch large_128', 'v5p:4x4x4', 'switch.py:large_128', SWITCH),
    ('LongT5 base', 'v5e:4x4', 'long_t5.py:base', f'{LONG}=8'),
    ('LongT5 base', 'v5p:4x4x4', 'long_t5.py:base', f'{LONG}=2'),
    ('LongT5 XL, `mesh.model=2`', 'v5e:4x4', 'long_t5.py:xl', f'{LONG}=16 mesh.fsdp=8 mesh.model=2'),
    ('LongT5 XL', 'v5p:4x4x4', 'long_t5.py:xl', f'{LONG}=2'),
    ('T5Gemma 2B-2B', 'h100:8', 't5gemma.py:2b', f'{FSDP} train.batch_size=512'),
    ('T5Gemma 2B-2B', 'v5e:8x8', 't5gemma.py:2b', FSDP),
)  # fmt: skip

FLAGS = flags.FLAGS
flags.DEFINE_string('only', '', 'Regular expression of the rows to plan.')


def main(argv: list[str]) -> None:
    print('| model | devices | GiB of a device | exchanged GB | step, s | MFU |')
    print('|---|---|---|---|---|---|', flush=True)
    environment = os.environ | {'LIBTPU_INIT_ARGS': ASYNCHRONOUS}
    for model, topology, config, settings in ROWS:
        if not re.search(FLAGS.only, f'{model} {topology}'):
            continue
        command = [sys.executable, 'main.py', '--mode=plan', f'--config=configs/{config}']
        command += [f'--topology={topology}', *[f'--config.{x}' for x in settings.split()]]
        plan = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
        [memory] = re.findall(r'microbatch\(es\): ([\d.]+ of [\d.]+) GiB', plan)
        megabytes = re.findall(r'^  [a-z-]+ .* ([\d,.]+)  \d+%$', plan, re.MULTILINE)
        exchanged = sum(float(x.replace(',', '')) for x in megabytes) / 1000
        [(seconds, mfu)] = re.findall(r'Estimate: (\S+) s a step, MFU ([\d.]+)\.', plan) or ['––']
        cells = [model, f'`{topology}`', memory, f'{exchanged:.3g}', seconds, mfu]
        print(f'| {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    app.run(main)
