"""The operator."""


def rotary_embedding(*args: object) -> None:
    raise NotImplementedError("SGLang was expected to rotate in torch")
