"""TLS: a context for the server's side of connections, from files."""

import ssl
from pathlib import Path
from typing import Literal

CertReqs = Literal[0, 1, 2]
"""Whether clients are asked for a certificate, in the numbers of Python's `ssl`: not at all, if they have one, always."""


def tls_context(
    certfile: Path | None, keyfile: Path | None = None, ca_certs: Path | None = None, cert_reqs: CertReqs = 0
) -> ssl.SSLContext | None:
    """Context of TLS 1.2 or later; None without a certificate.

    Args:
        certfile: the server's certificate and those that lead to its authority, in PEM; its key too without `keyfile`.
        keyfile: its private key, in PEM, without a password.
        ca_certs: certificates of authorities that sign clients'.

    Raises:
        ValueError: files do not go together, or one of them cannot be used; it names it.
    """
    if certfile is None:
        given = {"--ssl-keyfile": keyfile, "--ssl-ca-certs": ca_certs, "--ssl-cert-reqs": cert_reqs or None}
        if alone := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"expected --ssl-certfile beside {', '.join(alone)}, found none")
        return None
    if (cert_reqs != 0) != (ca_certs is not None):
        raise ValueError("expected --ssl-ca-certs and an --ssl-cert-reqs of 1 or 2 together, found one alone")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A password that is asked for on the terminal would keep a server from starting by itself.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:  # an `SSLError` is an `OSError`
        named = str(certfile) if keyfile is None else f"{certfile} with {keyfile}"
        expected = "expected a certificate and its key in PEM, without a password,"
        raise ValueError(f"--ssl-certfile: {expected} in {named} ({error})") from error
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ValueError(f"--ssl-ca-certs: expected certificates in PEM in {ca_certs} ({error})") from error
        context.verify_mode = ssl.VerifyMode(cert_reqs)
    return context
