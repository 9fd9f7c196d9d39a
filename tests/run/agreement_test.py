"""What all processes of a run agree on; two processes are in processes_test.py."""

from run.agreement import StopRequest


def test_processes_agree_on_the_first_signal():
    signals = iter([0, 15, 2])
    request = StopRequest(lambda: next(signals))
    assert [request.agree(count) for count in (1, 2, 3)] == [0, 15, 15]
