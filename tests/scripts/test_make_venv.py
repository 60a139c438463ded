"""uv is given what pip is configured with: what pip would find, from the same places."""

import pytest
from make_venv import as_uv

BEST = ["--index-strategy", "unsafe-best-match"]


@pytest.mark.parametrize(
    ("listed", "options", "environment"),
    [
        ("", [], {}),
        ("global.index-url='https://mirror/simple'", ["--index-url", "https://mirror/simple"], {}),
        (
            "global.extra-index-url='https://a\\nhttps://b'\nglobal.timeout='60'",
            ["--extra-index-url", "https://a", "--extra-index-url", "https://b"],
            {},
        ),
        (
            ":env:.find-links='/near'\nglobal.find-links='/far'\ninstall.no-index='true'",
            ["--find-links", "/near", "--no-index"],
            {},
        ),
        ("install.no-index='false'", [], {}),
        ("global.constraint='/etc/limits.txt'", ["--constraints", "/etc/limits.txt"], {}),
        (":env:.cert='/etc/ca.pem'", [], {"SSL_CERT_FILE": "/etc/ca.pem"}),
    ],
)
def test_uv_looks_where_pip_looks(listed, options, environment):
    assert as_uv(listed) == ([*BEST, *options], environment)


@pytest.mark.parametrize("option", ["require-hashes='1'", "trusted-host='mirror'", "pre='1'"])
def test_an_option_that_is_not_known_is_left_to_pip(option):
    assert as_uv(f"global.index-url='https://mirror/simple'\nglobal.{option}") is None
