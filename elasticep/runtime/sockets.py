"""The daemon's directory: one daemon at a time, no socket left from a dead one."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from elasticep.config import DaemonConfig
from elasticep.errors import ConfigError

_DIRECTORY_MODE = 0o750
_LOCK = "daemon.lock"
_STATE = "daemon.state"


class SocketDir:
    """Owns the directory from `take` to `release`.

    Args:
        config: names the directory and the two sockets.
    """

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._directory = Path(config.socket_dir)
        self._lock_fd = -1
        self._made = False

    @property
    def state_path(self) -> Path:
        """Where the next daemon finds what this one knew."""
        return self._directory / _STATE

    def take(self) -> None:
        """Make the directory, lock it, remove stale sockets.

        Raises:
            ConfigError: another daemon runs there, or it cannot be written.
        """
        try:
            if not self._directory.exists():
                self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True)
                self._made = True
            while not self._lock():
                pass  # a daemon that was leaving has just removed the file that we locked
        except BlockingIOError:
            raise ConfigError(
                f"another daemon runs in {self._directory}; stop it, or set daemon.socket_dir to "
                "another directory"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot use the socket directory {self._directory}: {error.strerror}; set "
                "daemon.socket_dir to one that this user may write"
            ) from None
        for path, kind in (
            (self._config.grpc_socket, socket.SOCK_STREAM),
            (self._config.fd_socket, socket.SOCK_SEQPACKET),
        ):
            self._remove_stale(path, kind)

    def _lock(self) -> bool:
        """Lock the file; False when it is not the one in the directory any more."""
        path = self._directory / _LOCK
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = path.exists() and os.path.samestat(os.fstat(fd), path.stat())
        except BaseException:
            os.close(fd)
            raise
        if not same:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def _remove_stale(self, path: str, kind: int) -> None:
        try:
            if self._in_use(path, kind):
                raise ConfigError(
                    f"another program listens on {path}; stop it, or set daemon.socket_dir to "
                    "another directory"
                )
            Path(path).unlink(missing_ok=True)
        except ConfigError:
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            raise ConfigError(f"cannot remove the old socket {path}: {error.strerror}") from None

    @staticmethod
    def _in_use(path: str, kind: int) -> bool:
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except BlockingIOError:
                return True
            except OSError as error:
                # A socket of another type, or a file that is none, is somebody's.
                return error.errno not in (errno.ENOENT, errno.ECONNREFUSED)
        return True

    def release(self, *, keep_state: bool) -> None:
        """Remove the sockets and unlock; with `keep_state` the next daemon takes over."""
        if self._lock_fd < 0:
            return
        names = [self._config.grpc_socket, self._config.fd_socket]
        if not keep_state:
            names.append(str(self.state_path))
            names.append(str(self._directory / _LOCK))
        for name in names:
            with contextlib.suppress(OSError):
                Path(name).unlink(missing_ok=True)
        if not keep_state and self._made:
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self._directory.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        os.close(self._lock_fd)
        self._lock_fd = -1
