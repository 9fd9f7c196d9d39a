"""The command line: parse the flags, read the config, and do what --mode asks for.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]
    python main.py --mode=evaluate --checkpoint=RUN [--step=all] [--split=test] [--watch]
    python main.py --mode=infer --checkpoint=PATH --text='...' [--config.KEY=VALUE ...]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR [--input=FILE] [--shard=i/n]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR --encode [--pool=mean]
    python main.py --mode=cache --config=... --config.data.cache_dirs=DIR [--shard=i/n]
    python main.py --mode=convert --from=CHECKPOINT --to=FOLDER [--format=t5x|hf]
    python main.py --mode=plan --config=... [--topology=v5e:16x16|h100:8|cpu:8|all]
    python main.py --mode=report --runs=RUN[,RUN...] [--output_dir=DIR]
    python main.py --mode=tasks [NAME] [--examples=3] [--split=test] [--vocabulary=FILE]

Exit status: 0 done; 1 failed, after the steps before are saved; 2 bad arguments or configuration;
129, 130 and 143 after SIGHUP, SIGINT and SIGTERM. An error is one line on stderr, below the traceback
of your own code if that failed. After a signal the run finishes and saves its step, and the same
command goes on from there. A second signal ends the process at once.

Compiled programs are kept for the next command in ~/.cache/t5_in_haiku (XDG_CACHE_HOME moves it);
JAX_ENABLE_COMPILATION_CACHE=false turns that off. On Linux, with CPUs alone, main.py starts itself anew with
GLIBC_TUNABLES=glibc.malloc.hugetlb=1, for huge pages; GLIBC_TUNABLES= turns that off. JAX_ENABLE_X64 has no
effect here: the settings have the dtypes.
"""

import gc
import io
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags
from ml_collections import config_flags

import user_code
from modes import command_line, huge_pages, processes, streams
from modes.signals import Signals

FLAGS = flags.FLAGS


def main(argv: list[str]) -> int:
    """Do what the flags in `argv` ask for. Return the exit status."""
    if command_line.HELP & set(argv[1:]):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
        try:
            streams.print_lines([__doc__, command_line.describe(argv)], sys.stdout)
        except OSError as error:
            return processes.fail(error, status=1)
        except ValueError as error:  # of the config whose options it lists
            return processes.fail(error, status=2)
        return 0
    os.environ['JAX_ENABLE_X64'] = '0'  # the settings have the dtypes
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may print names of files that are not UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    signals = Signals()
    gc.disable()  # what is prepared stays: to search it for cycles takes a tenth of the time
    try:
        config = command_line.parse(argv)
        if FLAGS.mode in ('train', 'evaluate', 'infer'):
            # A part of --mode=infer needs no others.
            if FLAGS.shard == '1/1' or FLAGS.process_id is not None:
                process = processes.start(
                    FLAGS.coordinator_address,
                    FLAGS.num_processes,
                    FLAGS.process_id,
                    FLAGS.heartbeat,
                )
                signals.is_silent = process > 0
                processes.check_same(command_line.all_values())
            from modes import compilation_cache, topology  # they import JAX

            topology.local_devices()  # raises ValueError without those of JAX_PLATFORMS
            compilation_cache.use()
        with user_code.naming_lines():
            work = prepare(config, signals)
    except (ValueError, OSError) as error:
        return processes.fail(error, status=2)
    finally:
        gc.enable()
    try:
        with user_code.naming_lines():
            signal_number = work() or 0
    except (FloatingPointError, ValueError, OSError) as error:  # the loss, the data, the disk
        return processes.fail(error, status=1)
    return processes.end(128 + signal_number if signal_number else 0)


def prepare(config: Any, signals: Signals) -> Callable[[], int | None]:
    """Prepare what --mode asks for. Return the function that does it.

    It returns the number of the signal that stopped it. Raises ValueError and OSError for bad input.
    """
    changes = {}
    if 'config' in command_line.FLAGS_OF_MODE[FLAGS.mode]:
        changes = command_line.changes()
    # Imported late: a wrong flag is reported before JAX starts.
    if FLAGS.mode == 'train':
        config_name = pathlib.Path(config_flags.get_config_filename(FLAGS['config'])).stem
        workdir = FLAGS.workdir
        if workdir is None:
            workdir = os.path.join('runs', config_name)
        from modes import profile
        from prepare import prepare as prepare_run

        steps = profile.parse(FLAGS.profile, workdir)
        run = prepare_run(config, workdir)
        signals.can_wait = True
        return lambda: profile.train_traced(run, steps, lambda: signals.number)
    if FLAGS.mode == 'evaluate':
        from modes import evaluate

        signals.advice = 'the same command goes on'
        return evaluate.prepare(config, changes, **command_line.values_of_mode()).run
    if FLAGS.mode == 'infer':
        from modes import infer

        part, num_parts = command_line.parse_shard(FLAGS.shard)
        request = infer.Request(
            **command_line.values_of_mode() | {'shard': part, 'num_shards': num_parts}
        )
        signals.advice = 'the same command goes on'
        job = infer.prepare(request, config, changes)
        return lambda: streams.print_lines(infer.infer_all(job), sys.stderr)
    lines: Iterable[str]
    if FLAGS.mode == 'tasks':
        from modes import tasks

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
        lines = tasks.describe(config.data, FLAGS.split, FLAGS.examples, FLAGS.vocabulary)
    elif FLAGS.mode == 'cache':
        from modes import cache

        signals.advice = 'the same command goes on'
        lines = cache.cache(config.data, *command_line.parse_shard(FLAGS.shard))
    elif FLAGS.mode == 'plan':
        from modes import plan

        lines = plan.plan(config, FLAGS.topology)
    elif FLAGS.mode == 'convert':
        from modes import convert, topology

        topology.local_devices()
        source = FLAGS['from'].value
        lines = [str(convert.convert_checkpoint(source, FLAGS.to, FLAGS.format, FLAGS.step))]
    else:
        from modes import report

        lines = [str(report.write(FLAGS.runs, FLAGS.output_dir))]
    return lambda: streams.print_lines(lines, sys.stdout)


if __name__ == '__main__':
    huge_pages.restart()
    streams.open_closed()
    status = main(sys.argv)
    streams.finish()
    sys.exit(status)
