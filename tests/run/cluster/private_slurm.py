"""A throw-away SLURM on this machine: nodes by loopback addresses, fake GPUs, with or without accounting.

Nothing needs systemd, control groups or a line in /etc/hosts. Debian's packages: slurmctld slurmd slurm-client munge,
and for accounting slurmdbd mariadb-server.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from getpass import getuser
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd", "sbatch", "munged")
ACCOUNTING = ("slurmdbd", "mariadbd")
SECONDS = 60
#: Wait of a job that is queued again, 120 s by default. Started at once, its node may refuse the job as the one that it
#: has just killed, and the job fails.
RESTART_SECONDS = 15


def missing(*, accounting=False):
    """The programs that are not on this machine."""
    return [
        name
        for name in (*DAEMONS, *(ACCOUNTING if accounting else ()))
        if shutil.which(name) is None
    ]


class PrivateSlurm:
    """A cluster in a folder, whose daemons end with the block.

    Args:
        folder: an empty one with a short path, since it holds sockets.
        nodes: number of nodes, each with `gpus` fake GPUs and `cpus` CPUs.
        accounting: whether jobs are accounted for (sacct).
        settings: further lines of slurm.conf.
    """

    def __init__(self, folder, *, nodes=2, gpus=2, cpus=4, accounting=False, settings=()):
        self.folder, self.nodes, self.gpus, self.cpus = Path(folder), nodes, gpus, cpus
        self.accounting, self.settings = accounting, settings
        self.conf = self.folder / "slurm.conf"
        self._daemons = {}

    def __enter__(self):
        self._before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.conf)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure):
        for name in ("slurmd*", "slurmctld", "slurmdbd", "mariadbd", "munged"):
            for number in [
                key for key in self._daemons if key.rstrip("0123456789") == name.rstrip("*")
            ]:
                self.end(number)
        if self._before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = self._before

    def call(self, *command):
        """Output of one of SLURM's commands."""
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def end(self, daemon, number=signal.SIGTERM):
        """End a daemon (`slurmd1`, `slurmctld`) by a signal."""
        process = self._daemons.pop(daemon)
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start_controller(self):
        """Start the controller, which takes up its state."""
        self._run("slurmctld", "slurmctld", "-D", "-f", self.conf)

    def start_node(self, number):
        """Start the daemon of a node, numbered from 1."""
        self._run(f"slurmd{number}", "slurmd", "-D", "-N", self.name(number), "-f", self.conf)

    def name(self, number):
        """The name of a node, which has to resolve."""
        return f"127.0.0.{number}"

    def _start(self):
        for name in ("munge", "state", "spool", "log", "dev"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for number in range(self.gpus):
            (self.folder / "dev" / f"nvidia{number}").symlink_to(
                "/dev/null"
            )  # a device; SLURM refuses regular files
        self._write()
        munge = self.folder / "munge"
        self._run(
            *(
                "munged",
                "munged",
                "--foreground",
                "--force",
                f"--key-file={key}",
                f"--socket={munge / 'sock'}",
            ),
            *(
                f"--pid-file={munge / 'pid'}",
                f"--log-file={munge / 'log'}",
                f"--seed-file={munge / 'seed'}",
            ),
        )
        self._until(lambda: (munge / "sock").exists())
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for number in range(1, self.nodes + 1):
            self.start_node(number)
        self._until(self._is_up)

    def _is_up(self):
        command = ["srun", "-Q", "-I2", "-N", str(self.nodes), "true"]
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0

    def _start_accounting(self):
        sql, socket_ = self.folder / "sql", self.folder / "sql.sock"
        sql.mkdir()
        self.call(
            *("mariadb-install-db", "--no-defaults", f"--user={getuser()}", f"--datadir={sql}"),
            *("--auth-root-authentication-method=normal", "--skip-test-db"),
        )
        self._run(
            *("mariadbd", "mariadbd", "--no-defaults", f"--user={getuser()}", f"--datadir={sql}"),
            *("--bind-address=127.0.0.1", f"--port={self.ports['sql']}", f"--socket={socket_}"),
            *("--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900", "--skip-log-bin"),
        )
        client = ["mariadb", "--no-defaults", "-uroot", "-S", str(socket_), "-e"]
        self._until(
            lambda: subprocess.run([*client, "select 1"], capture_output=True).returncode == 0
        )
        rights = (
            f"grant all on slurm.* to 's'@'{host}' identified by 's'"
            for host in ("127.0.0.1", "localhost")
        )
        self.call(*client, "; ".join(["create database slurm", *rights]))
        self._run("slurmdbd", "slurmdbd", "-D", SLURM_CONF=str(self.conf))
        self._until(self._has_cluster)

    def _has_cluster(self):
        subprocess.run(["sacctmgr", "-i", "add", "cluster", "perfexp"], capture_output=True)
        shown = subprocess.run(
            ["sacctmgr", "-nP", "show", "cluster", "format=cluster"], capture_output=True, text=True
        )
        return "perfexp" in shown.stdout.split()

    def _write(self):
        self.ports = {name: _free_port() for name in ("controller", "database", "sql")}
        host, user = socket.gethostname().partition(".")[0], getuser()
        munge = self.folder / "munge" / "sock"
        lines = {
            "ClusterName": "perfexp",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": self.ports["controller"],
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={munge},cred_expire={RESTART_SECONDS}",  # its side effect is that wait
            "StateSaveLocation": self.folder / "state",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmctldLogFile": self.folder / "log" / "slurmctld",
            "SlurmdSpoolDir": self.folder / "spool" / "%n",
            "SlurmdPidFile": self.folder / "slurmd.%n.pid",
            "SlurmdLogFile": self.folder / "log" / "slurmd.%n",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "SlurmdTimeout": 20,
            "KillWait": 5,
            "InactiveLimit": 0,
            "JobRequeue": 1,
            "GresTypes": "gpu",
            "AccountingStorageType": "accounting_storage/none",
        }
        if self.accounting:
            lines |= {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": self.ports["database"],
                "AccountingStoragePass": munge,
                "AccountingStorageTRES": "gres/gpu",
            }
            self._write_database(munge, user)
        written = {line.partition("=")[0] for line in self.settings}
        texts = [f"{key}={value}" for key, value in lines.items() if key not in written] + list(
            self.settings
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10 >> 20
        for number in range(1, self.nodes + 1):
            name = self.name(number)
            texts.append(
                f"NodeName={name} NodeAddr={name} NodeHostname={host} Port={_free_port()} CPUs={self.cpus} "
                f"RealMemory={memory} Feature=gpul40s Gres=gpu:l40s:{self.gpus}"
            )
        texts.append("PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        self.conf.write_text("\n".join(texts) + "\n")
        devices = f"{self.folder}/dev/nvidia[0-{self.gpus - 1}]"
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=l40s File={devices}\n")
        version = subprocess.run(
            ["slurmctld", "-V"], capture_output=True, text=True
        ).stdout.split()[-1]
        if tuple(map(int, version.split(".")[:2])) >= (
            24,
            5,
        ):  # it starts that plugin though nothing asks for it
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")

    def _write_database(self, munge, user):
        file = self.folder / "slurmdbd.conf"
        file.touch(0o600)
        lines = {
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={munge}",
            "DbdHost": "localhost",
            "DbdAddr": "127.0.0.1",
            "DbdPort": self.ports["database"],
            "SlurmUser": user,
            "PidFile": self.folder / "slurmdbd.pid",
            "LogFile": self.folder / "log" / "slurmdbd",
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "127.0.0.1",
            "StoragePort": self.ports["sql"],
            "StorageUser": "s",
            "StoragePass": "s",
            "StorageLoc": "slurm",
        }
        file.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))

    def _run(self, name, *command, **environment):
        log = (self.folder / "log" / f"{name}.out").open("ab")
        with log:
            self._daemons[name] = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def _until(self, is_so):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for name, process in self._daemons.items():
                assert process.poll() is None, f"{name} has ended: {self._log(name)}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                if is_so():
                    return
            time.sleep(0.2)
        raise AssertionError(f"SLURM did not start: {self._log('slurmctld')}")

    def _log(self, name):
        return "\n".join(
            file.read_text(errors="replace")[-1500:]
            for file in (self.folder / "log").glob(f"{name}*")
        )


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
