"""A Flower network on this machine: certificates, node keys, a SuperLink with TLS, SuperNodes; all
of it stopped at the end.

What stands here as a Python class an operator does by hand or by an orchestrator, on machines of
their own; the commands are the same.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
CONNECTION = "loopback"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
DAY = datetime.timedelta(days=1)


def make_certificates(folder: Path) -> None:
    """A certificate authority of one's own, `ca.pem`, and the server's certificate and key,
    `server.pem` and `server.key`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = datetime.datetime.now(datetime.UTC) - DAY

    def certificate(
        name: str, key: Any, issuer: str, signer: Any, extensions: list[tuple[Any, bool]]
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + 365 * DAY)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA384())

    authority = ec.generate_private_key(ec.SECP384R1())
    server = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
        ),
        False,
    )
    signs = x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True, decipher_only=False)
    root = certificate(
        "bayesfl example CA",
        authority,
        "bayesfl example CA",
        authority,
        [(x509.BasicConstraints(ca=True, path_length=0), True), (signs, True), (identifier, False)],
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    origin = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    leaf = certificate(
        "localhost",
        server,
        "bayesfl example CA",
        authority,
        [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (names, False),
            (origin, False),
        ],
    )
    (folder / "ca.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_key(folder / "server.key", server, serialization.PrivateFormat.PKCS8)


def make_node_key(path: Path) -> None:
    """A node's private key at `path`, and its public one beside it as `.pub`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, serialization.PrivateFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


def _write_key(path: Path, key: Any, form: serialization.PrivateFormat) -> None:
    """Only its owner may read it."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Loopback:
    """A SuperLink with TLS and node authentication, and what is started beside it; a context that
    stops everything.

    Args:
        folder: For certificates, keys, states and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }
        make_certificates(self.folder / "tls")
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = '
            f'"{self.folder / "tls" / "ca.pem"}"\n'
        )

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_all()

    @property
    def authority(self) -> Path:
        """The certificate by which nodes know the server."""
        return self.folder / "tls" / "ca.pem"

    def start(self, name: str, *command: str) -> None:
        """Starts a process with a log of its own, in a group of its own: what it starts in turn is
        stopped with it.
        """
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd=self.folder,
            start_new_session=True,
        )
        log.close()

    def start_superlink(self) -> None:
        """The server's end of the network; it keeps its nodes and runs in a database, so that it
        can be started again.
        """
        tls = self.folder / "tls"
        self.start(
            "superlink",
            *(
                "flower-superlink",
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--database",
                str(self.folder / "superlink.db"),
            ),
            *(
                "--ssl-ca-certfile",
                str(tls / "ca.pem"),
                "--ssl-certfile",
                str(tls / "server.pem"),
                "--ssl-keyfile",
                str(tls / "server.key"),
            ),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        self.until(self.listens, "the SuperLink to listen")

    def listens(self) -> bool:
        """Return whether somebody listens on the SuperLink's port."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0),
        ):
            return True
        return False

    def register(self, key: Path) -> None:
        """Tells the SuperLink a node's public key."""
        self.flwr("supernode", "register", str(key.with_suffix(".pub")), CONNECTION)

    def start_node(
        self,
        name: str,
        client: int,
        *,
        key: Path | None,
        authority: Path | None = None,
        config: Mapping[str, str] = {},
    ) -> None:
        """A client's end of the network.

        Args:
            name: Of its log.
            client: Which client it is.
            key: Its private key; None for none.
            authority: By whose certificate it knows the server.
            config: What its configuration says besides.
        """
        states = self.folder / "states" / name
        more = "".join(f' {option}="{value}"' for option, value in config.items())
        self.start(
            name,
            *(
                "flower-supernode",
                "--superlink",
                f"127.0.0.1:{self.port}",
                "--root-certificates",
                str(authority or self.authority),
            ),
            *(("--auth-supernode-private-key", str(key)) if key else ()),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f'client-id={client} state-dir="{states}"{more}'),
        )

    def flwr(self, *command: str) -> str:
        """Run `flwr` and return what it says; the CA's certificate is all it needs."""
        done = subprocess.run(
            [str(BIN / "flwr"), *command],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"flwr {' '.join(command)} ended with "
                f"{done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def submit(self, app: Path, **config: Any) -> int:
        """Starts a run of an app; its id."""
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return int(
            self._asked("run", str(app), CONNECTION, *(("--run-config", values) if values else ()))[
                "run-id"
            ]
        )

    def status(self, run: int) -> str:
        """Return how far a run is, as `running` or `finished:completed`."""
        return str(self._asked("list", CONNECTION, "--run-id", str(run))["runs"][0]["status"])

    def _asked(self, *command: str) -> Any:
        """Run `flwr` and return its answer, read from JSON.

        Raises:
            RuntimeError: It says that it failed.
        """
        said = self.flwr(*command, "--format", "json")
        answer = json.loads(said[said.index("{") :])
        if not answer["success"]:
            raise RuntimeError(f"flwr {' '.join(command)} failed: {answer['error-message']}")
        return answer

    def finish(self, run: int, *, seconds: float = 300.0) -> str:
        """Waits until a run has ended; how."""
        self.until(
            lambda: self.status(run).startswith("finished"),
            f"run {run} to end",
            seconds=seconds,
            pause=10.0,
        )
        return self.status(run)

    def said(self, run: int) -> str:
        """Return what the server's side of a run has logged."""
        return COLOURS.sub("", self.flwr("log", str(run), CONNECTION, "--show"))

    def log(self, name: str) -> str:
        """Return what a process has said, without colours."""
        return COLOURS.sub("", (self.folder / f"{name}.log").read_text(errors="replace"))

    def until(self, there: Any, what: str, *, seconds: float = 60.0, pause: float = 0.2) -> None:
        """Waits.

        Raises:
            TimeoutError: It takes too long; the message ends with what the processes said last.
        """
        end = time.monotonic() + seconds
        while not there():
            if time.monotonic() > end:
                tails = "\n".join(
                    f"--- {name}\n{self.log(name)[-2000:]}" for name in self.processes
                )
                raise TimeoutError(f"waited {seconds:g} seconds for {what}\n{tails}")
            time.sleep(pause)

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stops a process and all that it has started."""
        process = self.processes.pop(name)
        for way in (how, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, way)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a ClientApp can outlive its node

    def stop_all(self) -> None:
        """Stops everything that was started, nodes first."""
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            with contextlib.suppress(OSError):
                self.stop(name)


@contextlib.contextmanager
def network(
    folder: Path, clients: int, configs: Sequence[Mapping[str, str]] | None = None
) -> Iterator[Loopback]:
    """A SuperLink and a registered node for each client.

    Args:
        folder: As of `Loopback`.
        clients: Number of clients.
        configs: What each node's configuration says besides.
    """
    with Loopback(folder) as loopback:
        loopback.start_superlink()
        for client in range(clients):
            key = loopback.folder / "keys" / f"client-{client}"
            make_node_key(key)
            loopback.register(key)
            config = configs[client] if configs else {}
            loopback.start_node(f"client-{client}", client, key=key, config=config)
        yield loopback
