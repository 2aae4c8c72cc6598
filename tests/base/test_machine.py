"""The cores that a process may use: affinity, the quota of its container, and ranks on one machine."""

import os

import pytest

from vitrail.base import machine
from vitrail.base.machine import cpu_quota, usable_cores
from vitrail.images.workers import choose_workers


def write_files(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder / "cgroup", folder / "membership"


V1 = "cgroup/cpu/cpu.cfs_{}_us"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"membership": "0::/", "cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"membership": "0::/", "cgroup/cpu.max": "max 100000"}, None),
        ({"membership": "0::/", "cgroup/cpu.max": "200000 0"}, None),
        ({"membership": "0::/seen/only/outside", "cgroup/cpu.max": "200000 100000"}, 2),
        ({"membership": "0::/a/b", "cgroup/a/cpu.max": "100000 50000", "cgroup/a/b/cpu.max": "max 50000"}, 2),
        ({"membership": "4:cpu,cpuacct:/", V1.format("quota"): "300000", V1.format("period"): "100000"}, 3),
        (
            {"membership": "4:cpuset:/\n1:cpu:/x", V1.format("quota"): "-1", V1.format("period"): "100000"},
            None,
        ),
        (
            {
                "membership": "1:name=systemd:/\n2:cpu:/docker/1\n0::/",
                "cgroup/cpu/docker/1/cpu.cfs_quota_us": "400000",
                "cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        ({"cgroup/cpu.max": "200000 100000"}, 2),
        ({}, None),
    ],
)
def test_the_quota_of_control_groups_of_both_versions(files, want, tmp_path):
    assert cpu_quota(*write_files(tmp_path, files)) == want


def test_a_container_of_two_cores_on_a_large_machine_has_two_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for quota, want in (("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 64)):
        groups, membership = write_files(tmp_path, {"membership": "0::/", "cgroup/cpu.max": quota})
        monkeypatch.setattr(machine, "CGROUPS", groups)
        monkeypatch.setattr(machine, "MEMBERSHIP", membership)
        assert usable_cores() == want
    write_files(tmp_path, {"cgroup/cpu.max": "1600000 100000"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_cores() == 4
    assert choose_workers("auto", 10_000).count == 4
