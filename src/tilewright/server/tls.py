"""TLS context of the server."""

import ssl
from pathlib import Path
from typing import Literal

CertReqs = Literal[0, 1, 2]
"""Client certificates, as in Python's `ssl`: 0 none, 1 optional, 2 required."""


def tls_context(
    certfile: Path | None, keyfile: Path | None = None, ca_certs: Path | None = None, cert_reqs: CertReqs = 0
) -> ssl.SSLContext | None:
    """Makes a context for TLS 1.2 or later; None without a certificate.

    Args:
        certfile: certificate chain in PEM, with the private key unless `keyfile` is given.
        keyfile: private key in PEM, without a password.
        ca_certs: CA certificates for client certificates, in PEM.
        cert_reqs: whether clients need a certificate.

    Raises:
        ValueError: an option is missing, or a file cannot be used.
    """
    if certfile is None:
        values = {"key": keyfile, "client_ca": ca_certs, "client_cert": cert_reqs or None}
        if incomplete := [name for name, value in values.items() if value is not None]:
            raise ValueError(f"--tls: expected cert beside {', '.join(incomplete)}, found none")
        return None
    if (cert_reqs != 0) != (ca_certs is not None):
        raise ValueError("--tls: expected client_ca and client_cert=optional or required together, found one alone")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without `password`, OpenSSL would prompt for the password of an encrypted key on the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:  # an `SSLError` is an `OSError`
        files = str(certfile) if keyfile is None else f"{certfile} with {keyfile}"
        expected = "expected a certificate and its key in PEM, without a password,"
        raise ValueError(f"--tls cert: {expected} in {files} ({error})") from error
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ValueError(f"--tls client_ca: expected certificates in PEM in {ca_certs} ({error})") from error
        context.verify_mode = ssl.VerifyMode(cert_reqs)
    return context
