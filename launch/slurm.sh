#!/bin/bash
# Train on several nodes with several GPUs each, under SLURM:
#
#     sbatch --nodes=4 launch/slurm.sh --config=configs/small_c4.py --workdir=/shared/runs/small_c4
#
# One process runs on each node, with all of its GPUs. This checkout, its .venv, the data and the workdir
# are on a disk that all nodes share. Five minutes before the time limit, SLURM tells the run to stop: it
# saves its step, returns to the queue, and resumes from there when it is restarted.

#SBATCH --job-name=t5
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch

# The program reports which process failed; --kill-on-bad-exit ends a step whose node is gone.
srun --kill-on-bad-exit=1 python main.py "$@"
status=$?
if [ "$status" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # stopped by SIGTERM, and saved
exit "$status"
