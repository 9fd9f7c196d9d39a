"""The command line: parse the flags, read the config, and do what --mode asks for.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]
    python main.py --mode=evaluate --checkpoint=RUN [--step=all] [--split=test] [--watch]
    python main.py --mode=infer --checkpoint=PATH --text='...' [--config.KEY=VALUE ...]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR [--input=FILE] [--shard=i/n]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR --encode [--pool=mean]
    python main.py --mode=cache --config=... --config.data.cache_dirs=DIR [--shard=i/n]
    python main.py --mode=convert --from=CHECKPOINT --to=FOLDER [--format=t5x|hf|peft]
    python main.py --mode=plan --config=... [--topology=v5e:16x16|h100:8|cpu:8]
    python main.py --mode=report --runs=RUN[,RUN...] [--output_dir=DIR]
    python main.py --mode=tasks [NAME] [--examples=3] [--split=test] [--vocabulary=FILE]

Exit status: 0 done; 1 failed, with the earlier steps saved; 2 bad arguments or configuration; 128 + N after
signal N (SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2 or SIGXCPU). A wrong flag, setting or file prints one line on
stderr; a mistake in code, ours or yours, prints Python's traceback. After a signal, the run finishes its step and
saves it; the same command continues from there. A second signal ends the process at once.

Compiled programs are cached in ~/.cache/t5_in_haiku (XDG_CACHE_HOME moves it); JAX_ENABLE_COMPILATION_CACHE=false
turns this off. On Linux without accelerators, main.py restarts itself with GLIBC_TUNABLES=glibc.malloc.hugetlb=1,
for huge pages; GLIBC_TUNABLES= turns this off. JAX_ENABLE_X64 has no effect: the settings choose the dtypes.
"""

import importlib
import sys

from absl import flags

import modes
from messages import Refused
from modes import command_line, errors, process, processes

FLAGS = flags.FLAGS


def main(argv: list[str]) -> int:
    """Run the mode of the flags in `argv`; return the exit status."""
    group = processes.Group()  # this process alone
    if command_line.HELP & set(argv[1:]):
        process.end_with_reader()
        try:
            process.print_lines([__doc__, command_line.describe(argv)], sys.stdout)
        except Exception as error:  # raised by the config
            return group.fail(error, status=2 if isinstance(error, Refused) else 1)
        return 0
    process.begin()
    signals = process.Signals()
    try:
        if not __debug__:
            raise Refused('Haiku needs assertions: run python without -O and PYTHONOPTIMIZE')
        config = command_line.parse(argv)
        if FLAGS.mode in ('train', 'evaluate', 'infer'):
            # A shard of --mode=infer needs no other processes.
            if FLAGS.shard == '1/1' or FLAGS.process_id is not None:
                group = processes.join(*[getattr(FLAGS, name) for name in processes.FLAGS])
                signals.is_silent = group.number > 0
                group.check_same(command_line.all_values())
            from modes import compilation_cache, topology  # they import JAX

            topology.local_devices()  # raises ValueError if JAX_PLATFORMS has none
            compilation_cache.use()
        # Import the mode late, so that a wrong flag is reported before JAX starts. Its `main` returns the exit status.
        # It calls `signals.begin_work` when everything is prepared: earlier errors mean bad input.
        mode = importlib.import_module(f'.{FLAGS.mode}', modes.__name__)
        return group.end(mode.main(config, FLAGS, signals))
    except Exception as error:
        is_bad_input = signals.is_preparing and errors.is_one_line(error)
        return group.fail(error, status=2 if is_bad_input else 1)


if __name__ == '__main__':
    process.check_streams()
    process.restart()
    status = main(sys.argv)
    process.finish_streams()
    sys.exit(status)
