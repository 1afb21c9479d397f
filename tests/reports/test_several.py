"""What several ranks did, as people read it."""

import io

from perfexp.records.record import Metric, Series
from perfexp.reports import overview
from perfexp.reports.console import Console
from perfexp.summaries.analysis import Analysis


def with_ranks(make_record, *, share_low, phase="train", **more):
    record = make_record(phases=(phase,), **more)
    for point in record.points:
        if point.key.is_timed:
            figures = {
                "samples_per_second": 42.7,
                "0/samples_per_second": 21.6,
                "1/samples_per_second": 21.74,
            }
            point.metrics += [
                Metric(name=f"ranks/{name}", value=value, unit="samples/s")
                for name, value in figures.items()
            ]
            shares = {"communication_share": 0.168, "scaling_efficiency": 0.514}
            point.metrics += [
                Metric(name=f"ranks/{name}", value=value, unit="1")
                for name, value in shares.items()
            ]
            point.facts["ranks"] = {
                "communication_share": {"low": share_low, "high": 0.19},
                "scaling_efficiency": {"low": 0.50, "high": 0.53},
            }
    record.environment["ranks"] = {"devices": ["a", "b"], "backend": "nccl"}
    return record


def test_rates_and_shares_are_in_one_sentence_with_intervals(make_record):
    _, sentence = overview.ranks(with_ranks(make_record, share_low=0.15))
    assert sentence == (
        "check by bursts: together 42.7 samples/s, each 21.6 … 21.7 while all work, "
        "scaling efficiency 51 % (50 % … 53 %), waiting for gradients 17 % (15 % … 19 %)"
    )


def test_result_states_which_figures_cover_one_rank_or_all(make_record):
    record = with_ranks(make_record, share_low=0.15)
    for is_verbose in (False, True):
        out = io.StringIO()
        Console(out=out, verbose=is_verbose).results(Analysis.of(record))
        assert (
            "  batch, times and memory are of one rank; samples/s, power and energy of all\n"
            in out.getvalue()
        )
        assert "together 42.7 samples/s" in out.getvalue()


def test_losses_are_named_and_the_largest_comes_first(make_record):
    record = with_ranks(make_record, share_low=0.15)
    record.environment["ranks"] = {"sync_batch_norms": 46}
    for point in filter(lambda point: point.key.is_timed, record.points):
        shares = {"statistics_share": 0.3, "contention_share": 0.02}
        point.metrics += [
            Metric(name=f"ranks/{name}", value=value, unit="1") for name, value in shares.items()
        ]
    _, sentence = overview.ranks(record)
    losses = sentence.partition("51 % (50 % … 53 %), ")[2]
    assert losses == (
        "SyncBatchNorm (46 layers, in each of which the host waits) 30 % (no interval), "
        "waiting for gradients 17 % (15 % … 19 %), sharing the host 2.0 % (no interval)"
    )


def test_rate_of_one_rank_precedes_the_scaling_efficiency(make_record):
    record = with_ranks(make_record, share_low=0.15, batches=(8,))
    for point in record.points:
        point.series.append(
            Series(name="ranks/alone", samples=[9.0, 0.25, 0.15], warmup=1, calls_per_sample=4)
        )
    _, sentence = overview.ranks(record)
    assert (
        "each 21.6 … 21.7 while all work; one rank alone 40.0 samples/s, scaling efficiency 51 %"
        in sentence
    )


def test_an_interval_that_there_is_not_is_said(make_record):
    _, sentence = overview.ranks(with_ranks(make_record, share_low=None))
    assert "waiting for gradients 17 % (no interval)" in sentence


def test_points_are_named_where_there_are_several(make_record):
    _, *told = overview.ranks(with_ranks(make_record, share_low=0.15, batches=(4, 8)))
    assert [sentence.partition(":")[0] for sentence in told] == ["batch 4", "batch 8"]


def test_rank_metrics_are_not_repeated_and_absent_in_other_runs(make_record):
    record = with_ranks(make_record, share_low=0.15)
    grid = overview.metrics(Analysis.of(record))
    assert not any("ranks" in column.title for column in grid.columns)
    assert overview.ranks(make_record(phases=("train",))) == []
