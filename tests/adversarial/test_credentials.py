"""Credentials of a tracking store: used to connect, and nowhere else."""

import base64
import http.server
import threading
from urllib.parse import quote

import pytest

from perfexp.cli.overrides import parsed, without_credentials
from perfexp.host import credentials
from perfexp.tracking import store
from tests.support import processes
from tests.support.selection import slow_after

#: Each has what a password should not have, percent-encoded where a URL needs that.
SECRETS = (
    "s3cr3t-plain",
    "s3cr3t%2Fslash",
    "s3cr3t at@sign",
    "s3cr3t:colon",
    "s3cr3t,comma",
    "s3cr3t'quote",
)
FAKE = ("model=fake", "gpu=fake", "stopping=fixed", "tracking.request_timeout_seconds=2")


@pytest.fixture
def server():
    """A server that refuses everything: its address, and all that it was sent: headers and bodies."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            received.append((self.path, dict(self.headers), body))
            self.send_response(400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"127.0.0.1:{listening.server_port}", received
        listening.shutdown()
        thread.join()


def perfexp(folder, *arguments):
    """What a run prints, on stdout and stderr."""
    done = processes.run(*arguments, cwd=folder)
    return done.stdout + done.stderr


def leaks(folder, printed, words):
    """Where a word occurs in what was printed, and in names and contents of all that was left."""
    found = ["printed" for word in words if word in printed]
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        found += [str(path) for word in words if word in str(path) or word.encode() in content]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "axis", "file"])
def test_what_a_sweep_leaves_holds_no_credential(tmp_path, server, how):
    address, received = server
    url = f"http://joe:s3cr3tpass@{address}"
    given = ["-m", *FAKE, "output_dir=s"]
    if how == "file":
        (tmp_path / "mine" / "tracking").mkdir(parents=True)
        text = f"_target_: perfexp.tracking.mlflow_sink.MlflowSink\nuri: {url}\nrequest_timeout_seconds: 2\n"
        (tmp_path / "mine" / "tracking" / "own.yaml").write_text(text)
        given += ["batch_size=1,2", "tracking=own", "--config-dir=mine"]
    else:
        given += (
            ["batch_size=1,2", f"tracking.uri={url}"]
            if how == "plain"
            else [f"tracking.uri={url},{url}x"]
        )
    printed = perfexp(tmp_path, *given)
    (tmp_path / "mine" / "tracking" / "own.yaml").unlink(missing_ok=True)
    assert (tmp_path / "s" / "sweep.json").exists()
    assert leaks(tmp_path, printed, ["s3cr3tpass"]) == []
    assert received
    expected = base64.b64encode(b"joe:s3cr3tpass").decode()
    assert received[0][1]["Authorization"] == f"Basic {expected}"
    assert not any("s3cr3tpass" in path or b"s3cr3tpass" in body for path, _, body in received)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "form",
    ["http://joe:{}@host:1/p", "postgresql://u:{}@h/db?sslmode=require", "http://h?token={}"],
)
def test_override_hides_its_credential_but_the_store_receives_it(secret, form):
    url = form.format(secret)
    escaped = url.replace("\\", "\\\\").replace("'", "\\'")
    [argument] = without_credentials([f"tracking.uri='{escaped}'"])
    assert secret not in argument
    [override] = parsed([argument])
    assert credentials.reveal(override.value()) == url


def test_values_of_an_axis_stay_different():
    [argument] = without_credentials(["tracking.uri=http://joe:one1@h,http://ann:two2@h,http://h"])
    [override] = parsed([argument])
    masked = [value.text for value in override.value().list[:2]]
    assert [credentials.reveal(value) for value in masked] == [
        "http://joe:one1@h",
        "http://ann:two2@h",
    ]
    assert "one1" not in argument
    assert "two2" not in argument


@pytest.mark.parametrize(
    "text",
    [
        "model=resnet18",
        "tracking.uri=sqlite:////data/me@work/mlflow.db",
        "data.root=/data/a@b",
        "tracking.uri=http://host:5000",
        "mail joe@example.org",
    ],
)
def test_what_has_no_credential_is_left_as_it_is(text):
    assert without_credentials([text]) == [text]
    assert credentials.mask(text) == text


def test_messages_of_others_lose_what_was_taken_out():
    credentials.hide("http://joe:pa%73s-word@host/p?api_key=k3y-value")
    text = "cannot reach host with pass-word, k3y-value or pa%73s-word; see ftp://ann:x@y/z?token=1"
    assert (
        credentials.scrub(text)
        == "cannot reach host with ***, *** or ***; see ftp://***@y/z?token=***"
    )


@pytest.mark.parametrize(
    "flags", [["--cfg", "job"], ["--cfg=job", "--resolve"], ["--info", "defaults"]]
)
def test_a_configuration_is_printed_without_credentials(tmp_path, monkeypatch, flags):
    monkeypatch.setenv("OWN_URI", "http://joe:s3cr3tpass@h")
    assert (
        leaks(
            tmp_path,
            perfexp(tmp_path, *FAKE, "tracking.uri=${oc.env:OWN_URI}", *flags),
            ["s3cr3tpass"],
        )
        == []
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "override", ["tracking.uri=${oc.env:OWN_URI}", "tracking.uri='http://joe:${oc.env:OWN_PW}@{}'"]
)
def test_a_credential_of_the_environment_is_used_and_not_written(
    tmp_path, monkeypatch, server, override
):
    address, received = server
    monkeypatch.setenv("OWN_URI", f"http://joe:s3cr3tpass@{address}")
    monkeypatch.setenv("OWN_PW", "s3cr3tpass")
    printed = perfexp(
        tmp_path, "-m", *FAKE, "seed=1,2", "output_dir=s", override.replace("{}", address)
    )
    assert leaks(tmp_path, printed, ["s3cr3tpass"]) == []
    assert (
        received[0][1]["Authorization"] == f"Basic {base64.b64encode(b'joe:s3cr3tpass').decode()}"
    )


@pytest.mark.parametrize(
    "override",
    [
        "tracking={uri:'http://joe:s3cr3tpass tail@h'}",
        "tracking.uri=' http://joe:s3cr3tpass tail@h'",
        "http://joe:s3cr3tpass tail@h",
        "tracking.uri=http://joe:s3cr3tpass,tail@h",
        "tracking.uri=joe:s3cr3tpass@h",
        "tracking.uri=postgresql:password=s3cr3tpass",
    ],
)
def test_credential_in_an_unusable_form_is_not_shown(tmp_path, override):
    assert leaks(tmp_path, perfexp(tmp_path, *FAKE, "output_dir=x", override), ["s3cr3tpass"]) == []


@pytest.mark.parametrize("secret", slow_after(2, ["mlflow", "inference", "seed", "model"]))
def test_a_password_that_is_a_word_changes_nothing_else(tmp_path, secret):
    printed = perfexp(
        tmp_path, *FAKE, "output_dir=x", f"tracking.uri='http://joe:{secret}@127.0.0.1:9'"
    )
    assert "could not be sent to MLflow at http://***@127.0.0.1:9" in printed
    assert (tmp_path / "x" / "record.json").exists()


@pytest.mark.parametrize("command", ["sync", "ui"])
def test_store_option_is_shown_without_its_credential(tmp_path, command):
    place = [str(tmp_path)] if command == "sync" else []
    for url in (
        "http://joe:s3cr3tpass'x tail@127.0.0.1:9",
        "foo://joe:s3cr3tpass tail@h",
        "joe:s3cr3tpass@h",
    ):
        assert (
            leaks(tmp_path, perfexp(tmp_path, command, *place, "--uri", url), ["s3cr3tpass"]) == []
        )


def test_a_credential_in_a_nested_value_is_refused(tmp_path):
    printed = perfexp(tmp_path, *FAKE, "+x={uri:http://joe:s3cr3tpass@h}")
    assert printed.splitlines() == ["error: x: a URL with a credential must be a value of its own."]


def test_argument_that_is_not_an_override_hides_its_credential(tmp_path):
    assert (
        leaks(tmp_path, perfexp(tmp_path, f"http://joe:{quote('s3cr3tpass')}@h"), ["s3cr3tpass"])
        == []
    )


@pytest.mark.parametrize(
    ("place", "is_foreign"),
    [
        *(
            ("/data/artifacts/1", False),
            ("file:///data/artifacts/1", False),
            ("./a:b/1", False),
            ("s3://bucket/1", False),
        ),
        *(
            ("http://evil.example/1", True),
            ("HTTPS://evil.example/1", True),
            ("mlflow-artifacts://evil.example/1", True),
        ),
        *(("sftp://evil.example/1", True), ("ftp://evil.example/1", True)),
    ],
)
@pytest.mark.parametrize("uri", ["sqlite:////data/shared.db", "postgresql://host/mlflow"])
def test_artifact_places_on_other_hosts_are_foreign_to_a_store(uri, place, is_foreign):
    assert store.is_foreign_place(place, uri) is is_foreign
