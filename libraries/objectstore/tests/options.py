"""The options of a tier over a bucket: what is refused before anything is opened, with what was expected."""

import re
from typing import Any

import pytest
from libraries.objectstore.tests.differences import Suite
from pydantic import ValidationError

from kvtiers.api import TierConfig
from kvtiers.config.options import options_of

__all__ = ["OptionsTests"]


class OptionsTests(Suite):
    """The tests that S3, Google Cloud Storage and Azure share. A subclass gives its ``differences``."""

    def config(self, **options: Any) -> Any:
        """Return the options of a tier that is never opened."""
        return self.differences.config_class.model_validate({**self.differences.options, **options})

    def refusal(self, **options: Any) -> str:
        """Return why these options are refused."""
        with pytest.raises(ValidationError) as refused:
            self.config(**options)
        [error] = refused.value.errors()
        return str(error["msg"])

    @pytest.mark.parametrize("prefix", ["/a", "a/", "a//b", "a/../b", ".", "a b", "ä", "a\nb", "a?b", "a%20b", "a+b"])
    def test_a_prefix_that_servers_would_not_all_take_alike_is_refused(self, prefix):
        assert "expected parts of letters, digits" in self.refusal(prefix=prefix)

    @pytest.mark.parametrize("prefix", ["", "a", "team/kv-cache_1", "a.b/(c)"])
    def test_a_prefix_is_taken_as_it_is(self, prefix):
        assert self.config(prefix=prefix).prefix == prefix

    @pytest.mark.parametrize("url", ["s3.local", "ftp://s3.local", "https://s3.local/a/b", "https://", "http://a b"])
    def test_an_endpoint_is_a_url(self, url):
        assert "expected 'https://HOST'" in self.refusal(endpoint=url)

    def test_an_endpoint_loses_its_last_slash(self):
        assert self.config(endpoint="http://s3.local:9000/").endpoint == "http://s3.local:9000"

    def test_options_that_do_not_fit_together_are_refused(self, unfit):
        options, said = unfit
        assert said in self.refusal(**options)

    def test_a_time_out_longer_than_the_deadline_and_parts_smaller_than_the_services_are_refused(self):
        assert "longer than the tier's deadline (30 s)" in self.refusal(timeout="31s")
        least = self.differences.part
        assert f"greater than or equal to {least}" in self.refusal(part_size=least - 1)

    def test_the_readme_has_every_option_with_its_type_and_its_default(self):
        readme = (self.differences.folder / "README.md").read_text(encoding="utf-8")
        common = options_of(TierConfig)
        own = [option for option in options_of(self.differences.config_class) if option not in common]
        assert all(option.description for option in own)
        assert set(documented(readme)) == {
            (o.name, o.type, "required" if o.required else "" if o.default == "none" else o.default) for o in own
        }


def documented(readme: str) -> Any:
    """Yield name, type and default of each option in the README's table."""
    table = readme.partition("## Options")[2].partition("\n\n|")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, kind, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert meaning
        names, defaults = re.findall(r"`(.+?)`", names), re.findall(r"`(.+?)`", default) or [default]
        for name, text in zip(names, defaults * (len(names) // len(defaults)), strict=True):
            yield name, "boolean" if kind == "true or false" else kind.replace("`", "").replace(", ", " | "), text
