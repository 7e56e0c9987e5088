"""Whether PEM files can serve mutual TLS."""

from elasticep.errors import ConfigError


def check_pem(cert: str, key: str, ca: str) -> None:
    """Raise `ConfigError` that names the file which cannot be used.

    gRPC says of a broken file only that it cannot listen, or cannot connect.

    Args:
        cert: path of a certificate, with those that link it to an authority.
        key: path of its private key.
        ca: path of the certificates of the authorities that sign the peers'.
    """
    import ssl  # slow to load, and not needed without TLS

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password here, one would be asked for on the terminal.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the TLS certificate {cert!r} with the key {key!r} cannot be used ({error}); both "
            "must be PEM and belong together, and the key must not be encrypted"
        ) from None
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the TLS authorities in {ca!r} cannot be used ({error}); it must hold certificates "
            "in PEM"
        ) from None
