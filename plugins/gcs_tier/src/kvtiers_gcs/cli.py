"""``kvtiers-gcs``: the command line for the bucket's administrator."""

from kvtiers_gcs.bucket_settings import rules_for
from kvtiers_objectstore.lifecycle_command import run

__all__ = ["main"]

_EXPLANATION = """\
The bucket needs these rules; nothing was set. Cloud Storage replaces all rules of a bucket at once, so add them to the
existing ones:
  gcloud storage buckets describe gs://{place} --format="json(lifecycle_config)"
  (add the rules to "rule", in rules.json)
  gcloud storage buckets update gs://{place} --lifecycle-file=rules.json
What is deleted is kept for a week by the default of new buckets, and paid for; a cache needs none of that:
  gcloud storage buckets update gs://{place} --clear-soft-delete
"""


def main() -> None:
    """Run the command line."""
    run("kvtiers-gcs", "bucket", _EXPLANATION, lambda _bucket, prefix, days: rules_for(prefix, days))
