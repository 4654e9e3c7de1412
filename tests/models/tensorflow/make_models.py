"""Writes the TensorFlow models beside it. TensorFlow is 600 MB, so what it wrote is kept; run by hand, once.

    pip install tensorflow-cpu==2.21.0 && python tests/models/tensorflow/make_models.py

A convolution and a dense layer over 8x8 pixels, weights of a fixed seed: `saved_model/`, `model.tflite`, and
`expected.npz` with inputs and what TensorFlow and TensorFlow Lite answer. `py_function/` is a SavedModel that calls
Python, `lambda.keras` a Keras file whose layer is Python code; both would make a file called `canary`. `digits.keras`
and `digits.h5` are one Keras model, the second as a Sequential, and `digits.npz` what it answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
CANARY = "canary"


class Network(tf.Module):
    """[rows, 64] -> chances [rows, 10]."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(5)
        self.kernel = tf.Variable(random.normal(0, 0.5, (3, 3, 1, 4)).astype(np.float32))
        self.dense = tf.Variable(random.normal(0, 0.2, (256, 10)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 64], tf.float32, name="image")])
    def __call__(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """See the class."""
        picture = tf.reshape(image, [-1, 8, 8, 1])
        edges = tf.nn.relu(tf.nn.conv2d(picture, self.kernel, strides=1, padding="SAME"))
        return {"chances": tf.nn.softmax(tf.reshape(edges, [-1, 256]) @ self.dense)}


class Calling(tf.Module):
    """A model that calls Python."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        """See the class."""
        return {"y": tf.py_function(_touch, [x], tf.float32)}


def _touch(x: tf.Tensor) -> tf.Tensor:
    Path(CANARY).touch()
    return x


def write_keras() -> None:
    """Write a Keras model over the same pixels, in both formats: of layers called by hand, and as a Sequential."""
    keras = tf.keras
    keras.utils.set_random_seed(5)
    image = keras.Input((64,), name="image")
    edges = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(keras.layers.Reshape((8, 8, 1))(image))
    found = keras.layers.Flatten()(keras.layers.MaxPooling2D()(keras.layers.BatchNormalization()(edges)))
    model = keras.Model(image, keras.layers.Dense(10, activation="softmax", name="chances")(found))
    model.save(HERE / "digits.keras")
    keras.Sequential([image, *model.layers[1:]]).save(HERE / "digits.h5")
    rows = np.random.default_rng(6).uniform(0, 1, (8, 64)).astype(np.float32)
    np.savez_compressed(HERE / "digits.npz", image=rows, chances=model(rows).numpy())


def main() -> None:
    """Write all."""
    network = Network()
    tf.saved_model.save(network, str(HERE / "saved_model"), signatures=network.__call__)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(HERE / "saved_model"))
    (HERE / "model.tflite").write_bytes(converter.convert())
    image = np.random.default_rng(6).uniform(0, 1, (8, 64)).astype(np.float32)
    np.savez_compressed(HERE / "expected.npz", image=image, chances=network(image)["chances"].numpy())
    calling = Calling()
    tf.saved_model.save(calling, str(HERE / "py_function"), signatures=calling.__call__)
    inputs = tf.keras.Input((4,))
    layer = tf.keras.layers.Lambda(lambda x: __import__("pathlib").Path("canary").touch() or x, output_shape=(4,))
    outputs = layer(inputs)
    tf.keras.Model(inputs, outputs).save(HERE / "lambda.keras")
    write_keras()


if __name__ == "__main__":
    main()
