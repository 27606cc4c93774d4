"""What pyproject.toml cannot say: the wheel holds libraries of this platform, and needs no version of Python."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class OfThisPlatform(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"bdist_wheel": OfThisPlatform}, distclass=Binary)
