#!/bin/bash
# Train on a slice of TPU VMs in Google Cloud:
#
#     launch/tpu_vm.sh create t5 us-west4-a v5litepod-16       # the slice, and this program on each of its VMs
#     launch/tpu_vm.sh run t5 us-west4-a --config=configs/small_c4.py --workdir=gs://BUCKET/runs/small_c4
#     launch/tpu_vm.sh delete t5 us-west4-a
#
# The VMs clone REPOSITORY. The workdir is in a bucket that their service account may write, or on a disk
# that all of them share. JAX asks the VM for the other processes of its slice: no flag names them. `run`
# starts or continues a run; the output of process 0 is in run.log on the first VM, and here. If a VM is
# maintained or preempted, all processes end with status 1: the same command resumes the run.
set -eu
if [ $# -lt 3 ]; then
  sed -n '4,6s/# *//p' "$0" >&2
  exit 2
fi
action=$1 name=$2 zone=$3
shift 3

on_all_vms() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

case $action in
  create)
    gcloud compute tpus tpu-vm create "$name" --zone="$zone" --accelerator-type="$1" \
      --version="${VERSION:-v2-alpha-tpuv5-lite}"
    on_all_vms "git clone $REPOSITORY t5-haiku && cd t5-haiku && python3 -m venv .venv &&
      .venv/bin/pip install -U pip && .venv/bin/pip install -e '.[tpu,gcs]'"
    ;;
  run)
    on_all_vms "cd t5-haiku && .venv/bin/python main.py $(printf '%q ' "$@") 2>&1 | tee -a run.log;
      exit \${PIPESTATUS[0]}"
    ;;
  delete)
    gcloud compute tpus tpu-vm delete "$name" --zone="$zone" --quiet
    ;;
  *)
    echo "$action: use create, run or delete" >&2
    exit 2
    ;;
esac
