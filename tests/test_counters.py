"""What `scripts/counters.py` reads of the output of Nsight Compute."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "counters.py"

PRINTED = """
==PROF== Connected to process 7
  ampere_backward (2048, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: Command line profiler metrics
    ------------------------------------------ ----------- ------------
    Metric Name                                Metric Unit Metric Value
    ------------------------------------------ ----------- ------------
    l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed  %  65.08
    sm__cycles_elapsed.max                                                    cycle    4,264,340
    sm__inst_issued.avg.pct_of_peak_sustained_elapsed                             %        30.56
    sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed               %        44.93
    smsp__pcsamp_warps_issue_stalled_selected                           warp       100
    smsp__pcsamp_warps_issue_stalled_wait                               warp       300
    smsp__pcsamp_warps_issue_stalled_barrier                            warp       600
    smsp__pcsamp_warps_issue_stalled_barrier_not_issued                 warp       500
  void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, 0, 0, cutlass::bf
    l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed  %  37
    sm__cycles_elapsed.max                                                    cycle    1,000
    sm__inst_issued.avg.pct_of_peak_sustained_elapsed                             %        51.2
    sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed               %        46.5
    smsp__pcsamp_warps_issue_stalled_wait                               warp       1
"""


def test_rows():
    ours, flash = runpy.run_path(str(SCRIPT))["rows"](PRINTED)
    assert ours == {
        "kernel": "ampere_backward",
        "cycles": 4264340,
        "tensor": 0.449,
        "shared": 0.651,
        "issue": 0.306,
        "stalls": {"barrier": 0.6, "wait": 0.3},
    }
    assert (flash["kernel"], flash["cycles"]) == ("flash_fwd_kernel", 1000)
