"""Every exception that torch-ps raises on purpose.

    PsError
    ├── ConfigError            a setting, flag or address is wrong
    │   └── AddressError       the address to advertise can't be used by the other hosts
    ├── ModelError             the model or optimizer can't be served as given
    │   ├── UnsupportedError   a feature that is refused by name
    │   ├── ModelMismatch      differs from the model the job already trains
    │   └── LocalWeightEdit    weights were changed locally between two steps
    ├── NonFiniteGradient      a gradient holds inf or NaN
    ├── TransportError         a call to a server did not bring an answer
    │   ├── CallTimeout        no answer within the call's deadline
    │   └── PeerLost           the connection broke; this peer alias is dead for ever
    ├── Refused                the other side answered, and said no (do not retry)
    │   ├── Fenced             this incarnation was evicted; only a new one may go on
    │   └── WireError          a message that can't be right: format, type, size, id
    ├── CoordinatorLost        no coordinator within the stated bound
    ├── GroupLost              another process of this worker's process group is gone
    ├── JobFailed              the coordinator announced that the job has failed
    └── ForkedProcess          used in a forked child, where RPC can't work

Messages say what happened, for which id, what was got and expected, and what to do. All pickle.
"""

from __future__ import annotations


class PsError(Exception):
    """Base of all errors of torch-ps."""


class ConfigError(PsError):
    """A setting, flag, environment variable or address is wrong."""


class AddressError(ConfigError):
    """The address to listen on or to advertise can't be used."""


class ModelError(PsError):
    """The model or the optimizer can't be served as given."""


class UnsupportedError(ModelError):
    """A feature that torch-ps refuses by name, with the reason."""


class ModelMismatch(ModelError):
    """This worker's model or optimizer differs from the one that the job trains."""


class LocalWeightEdit(ModelError):
    """A weight was changed locally between two steps; the next pull would overwrite it silently."""


class NonFiniteGradient(PsError):
    """A gradient holds inf or NaN; nothing of this step was sent."""


class TransportError(PsError):
    """A call brought no answer; whether the other side has acted on it is unknown."""


class CallTimeout(TransportError):
    """No answer within the call's deadline."""


class PeerLost(TransportError):
    """The connection to a peer broke."""


class Refused(PsError):
    """The other side answered and refused; asking again will not help."""


class Fenced(Refused):
    """This incarnation was evicted by the coordinator; only a new process may go on."""


class WireError(Refused):
    """A message with a wrong format, type, size or id."""


class CoordinatorLost(PsError):
    """The coordinator could not be reached within the stated bound."""


class GroupLost(PsError):
    """A process of this worker's process group is gone; the group can't go on without it."""


class JobFailed(PsError):
    """The coordinator announced that the job has failed; the message holds its reason."""


class ForkedProcess(PsError):
    """A transport or control client was used in a forked child, where it can't work."""
