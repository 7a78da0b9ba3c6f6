"""The end of a forward whose further layers are not needed."""


class ForwardEnded(BaseException):
    """For `Filling` alone, which asks for it and catches it: no `except Exception` of a model does."""
