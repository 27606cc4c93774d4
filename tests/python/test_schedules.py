"""Schedules of pipelines as values from Python: their tables, costs and pictures, and tables that are wrong."""

import pytest

import tessera as ts


def test_schedules_as_values():
    costs = ts.PipelineCosts.uniform(4, 1, 1, 1)
    schedule = ts.Schedule("1f1b", 4, 8)
    timeline = schedule.simulate(costs)
    assert timeline.makespan == 33 and timeline.peak == [4, 3, 2, 1] == schedule.peak_memory() and timeline.bubble == pytest.approx(3 / 11)
    assert timeline.work == 24 == timeline.busy[2] and timeline.spans[0][0] == (0, 1)
    assert timeline.text(1).splitlines()[3].startswith("rank 3: ...FBBfbb") and timeline.text(1) in str(timeline) + "\n"
    assert schedule._repr_svg_().startswith("<svg") and timeline._repr_svg_() == schedule._repr_svg_()
    assert ts.makespan_bound(ts.loop_placement(4), 8, costs) == 27 and ts.v_placement(2) == [0, 1, 1, 0]
    for name in ts.schedules():
        for ranks in (1, 2, 4):
            one = ts.Schedule(name, ranks, 3)
            one.check()
            one.check(memory_limit=one.peak_memory())
            assert ts.Schedule.from_csv(one.csv()) == one and hash(ts.Schedule.from_csv(one.csv())) == hash(one)
            again = ts.Schedule.from_table(one.actions, one.placement, 3)
            assert again.actions == one.actions and str(one).count("\n") == ranks and one.stages_of(0)[0] == 0
            one.lowered(sharded=[True] * one.stages, reduced=[True] * one.stages).check()
            one.forward_only().check(backward=False)
            assert not any("I" in a for row in one.join_backward([True] * one.stages).actions for a in row)
            one.merge_backward(ts.PipelineCosts.uniform(one.stages)).check()
    stage = ts.StageCosts(2.0, recompute=True, kept_for_weight=0.5)
    assert ts.PipelineCosts([stage], sizes=[1, 2]).stages == [stage] and ts.PipelineCosts([stage], sizes=[1, 2]).sizes == [1, 2]


def test_tables_that_are_wrong():
    late = ts.Schedule.from_table([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], [0, 1], 2)
    (fault,) = late.faults()
    assert (fault.kind, fault.rank, fault.action) == ("deadlock", 0, "0B0") and str(fault) == fault.text and "waits" in fault.why
    assert late._repr_svg_() is None  # a notebook shows the text
    for wrong in (late.check, late.simulate, late.lowered):
        with pytest.raises(ts.ScheduleError, match="deadlock"):
            wrong()
    for make, error, text in [
        (lambda: ts.Schedule("2f2b", 2, 2), ts.InvalidArgument, "1f1b, interleaved"),
        (lambda: ts.Schedule("1f1b", 2, 0), ts.InvalidArgument, "micro-batches"),
        (lambda: ts.Schedule("zero_bubble_v", 2, 2, chunks=3), ts.InvalidArgument, "chunks = 2"),
        (lambda: ts.Schedule.from_table([["0F0", "0G0"]], [0], 1), ts.ScheduleSyntaxError, "line 1, column 6"),
        (lambda: ts.Schedule.from_csv("nothing"), ts.ScheduleSyntaxError, "line 1"),
        (lambda: ts.Schedule.gpipe([0, 2], 2), ts.InvalidArgument, "rank"),
        (lambda: ts.Schedule("1f1b", 2, 2).simulate(ts.PipelineCosts.uniform(3)), ts.InvalidArgument, "3"),
        (lambda: ts.Schedule("1f1b", 2, 2).check(sends="later"), ts.InvalidArgument, "rendezvous"),
        (lambda: ts.Schedule.for_costs([0, 1], 4, ts.PipelineCosts.uniform(2), memory_limit=[0.5]), ts.InvalidArgument, "limit"),
    ]:
        with pytest.raises(error, match=text):
            make()
