"""What the fork server imports before it forks worker processes, so that each of them starts in milliseconds.

Only multiprocessing's fork server imports this module.
"""

import signal

import vitrail.images.crop
import vitrail.images.worker_process  # noqa: F401

# It was started with Ctrl-C blocked. One that came in the meantime is for the parent alone.
_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, _before)
