"""One mistake, one line: where, what, what was expected, and what to do."""

# ruff: noqa: E501 -- a row of these tables is a mistake and its line, side by side

import pytest

from kvtiers.config import load_config

MINIMAL = "version: 1\nprimary: {capacity: 1GiB}\n"
# Each line stands for nine times what the one before it does.
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("version: 2\nprimary: {capacity: 1}\n", "version: expected 1, got 2"),
        ("primary: {capacity: 1}\n", "'version' is missing; expected 1"),
        ("version: 1\n", "'primary' is missing; expected a mapping of options"),
        ("version: 1\nprimary: 7\n", "primary: expected a mapping of options, got 7"),
        ("version: 1\nprimary:\n", "primary: expected a mapping of options, got nothing"),
        ("version: 1\nprimary: {}\n", "primary: 'capacity' is missing; expected a size such as '64GiB'"),
        ("version: 1\nprimary: {capcity: 1GiB}\n", "primary: unknown option 'capcity'. Did you mean 'capacity'?"),
        ("version: 1\nprimary: {capacity: }\n", "primary.capacity: expected a size such as '64GiB', got nothing"),
        ("version: 1\nprimary: {capacity: lots}\n", "primary.capacity: expected a size such as '64GiB', got 'lots'"),
        ("version: 1\nprimary: {capacity: yes}\n", "primary.capacity: expected a size such as '64GiB', got true"),
        ("version: 1\nprimary: {capacity: 0}\n", "primary.capacity: expected more than 0, got 0"),
        ("version: 1\nprimary: {capacity: 64GX}\n", "primary.capacity: unknown unit 'GX' in '64GX'; use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"),
        (f"version: 1\nprimary: {{capacity: {'9' * 400}GiB}}\n", "primary.capacity: expected a size such as '64GiB', got a number of 400 digits"),
        ("version: 1\nprimary: {capacity: 1, huge_pages: 3MiB}\n", "primary.huge_pages: expected 'off', '2MiB' or '1GiB', got '3MiB'"),
        ("version: 1\nprimary: {capacity: 1, numa_node: -1}\n", "primary.numa_node: expected at least 0, got -1"),
        ("version: 1\nprimary: {capacity: 1, numa_node: 1024}\n", "primary.numa_node: expected less than 1024, got 1024"),
        (f"version: 1\nprimary: {{capacity: 1, numa_node: 1{'0' * 30}}}\n", f"primary.numa_node: expected less than 1024, got 1{'0' * 30}"),
        ("version: 1\nprimary: {capacity: 999999999PiB}\n", "primary.capacity: '999999999PiB' is more than any machine has; expected at most 1024PiB"),
        ("version: 1\nprimary: {capacity: 1, start_deadline: 293000d}\n", "primary.start_deadline: '293000d' is too long; expected at most 36500d"),
        ("version: 1\nprimary: {capacity: 1}\nload_wait: 1000000000000d\n", "load_wait: '1000000000000d' is too long; expected at most 36500d; or 'auto'"),
        ("version: 1\nprimary: {capacity: 1, numa_node: on}\n", "primary.numa_node: expected a whole number, got true"),
        ("version: 1\nprimary: {capacity: 1, prefault: perhaps}\n", "primary.prefault: expected 'ahead', 'all' or 'off', got 'perhaps'"),
        ("version: 1\nprimary: {capacity: 1, pin_share: 0%}\n", "primary.pin_share: expected more than 0, got '0%'"),
        ("version: 1\nprimary: {capacity: 1, start_deadline: 0s}\n", "primary.start_deadline: expected more than 0, got '0s'"),
        (MINIMAL + "foo: 1\n", "unknown option 'foo'. Options: version, namespace, model, primary, secondary, encryption, lookup_wait, load_wait, start_wait, budgets, clean_reserve, record, tracing, events, what_if, tenants."),
        (MINIMAL + "5: 1\n", "unknown option '5'. Options: version, namespace, model, primary, secondary, encryption, lookup_wait, load_wait, start_wait, budgets, clean_reserve, record, tracing, events, what_if, tenants."),
        (MINIMAL + "Secondary: []\n", "unknown option 'Secondary'. Did you mean 'secondary'?"),
        (MINIMAL + "lookup_wait: 20\n", "lookup_wait: no unit in 20; use us, ms, s, m, h or d, such as '250ms'"),
        (MINIMAL + "lookup_wait: 20xs\n", "lookup_wait: unknown unit 'xs' in '20xs'; use us, ms, s, m, h or d, such as '250ms'"),
        (MINIMAL + "load_wait: never\n", "load_wait: expected a duration such as '250ms', got 'never'; or 'auto'"),
        (MINIMAL + "load_wait: [auto]\n", "load_wait: expected a duration such as '250ms', got ['auto']; or 'auto'"),
        (MINIMAL + "clean_reserve: 200%\n", "clean_reserve: a share is at most 100%, got '200%'"),
        (MINIMAL + "record: {max_bytes: 1GiB}\n", "record: 'path' is missing; expected a text"),
        (MINIMAL + "events: {endpoint: 5557}\n", "events.endpoint: expected a text, got 5557; put it in quotes"),
        (MINIMAL + "events: {endpoint: 'tcp://*:70000'}\n", "events.endpoint: expected tcp://HOST:PORT, such as 'tcp://*:5557', or ipc://@NAME, got 'tcp://*:70000'"),
        (MINIMAL + "events: {replay_endpoint: 'ipc:///tmp/x'}\n", "events.replay_endpoint: 'ipc:///tmp/x' is a socket file, which stays behind when the engine is killed; expected a socket without one, such as 'ipc://@kvtiers-events'"),
        (MINIMAL + "events: {encoding: json}\n", "events.encoding: expected 'map' or 'array', got 'json'"),
        (MINIMAL + "events: {tiers: {disk: {medium: DISK}}}\n", "'events.tiers' names 'disk', which is no tier of this config; there are: none"),
        (MINIMAL + "secondary: [{type: shelf, path: /mnt}]\nevents: {tiers: {shelf: {locality: NEAR}}}\n", "events.tiers.shelf.locality: expected 'LOCAL' or 'REMOTE', got 'NEAR'"),
        (MINIMAL + "clean_reserve: 5GiB\n", "clean_reserve: unknown unit 'GiB' in '5GiB'; write a share such as '10%'"),
        (MINIMAL + "budgets: {all_tiers: 60%}\n", "budgets: store_reserve (10%), all_tiers (60%), protected (40%) are 110% together, expected at most 100%"),
        (MINIMAL + "tenants: {named: {Blue: {}}}\n", "tenants.named: tenant 'Blue' cannot be used; expected 1 to 64 of a-z 0-9 . _ -, first a letter or digit, no '..'"),
        (MINIMAL + f"tenants: {{named: {{{'b' * 60}: {{}}}}}}\n", f"tenants.named: tenant '{'b' * 60}' cannot be used: it has 60 characters, the namespace 7; expected at most 61 together"),
        (MINIMAL + "tenants: {named: {blue: {shar: 10%}}}\n", "tenants.named.blue: unknown option 'shar'. Did you mean 'share'?"),
        (MINIMAL + "tenants: {named: {blue: {share: 10GiB}}}\n", "tenants.named.blue.share: unknown unit 'GiB' in '10GiB'; write a share such as '10%'"),
        (MINIMAL + "tenants: {named: {blue: {share: 60%}, red: {share: 50%}}}\n", "tenants: the shares of 2 tenants are 110%, expected at most 100%"),
        (MINIMAL + "model: {name: ''}\n", "model.name: expected at least 1 character, got ''"),
        (MINIMAL + "model: {name: m, kv_dtype: 16}\n", "model.kv_dtype: expected a text, got 16; put it in quotes"),
        (MINIMAL + "model: {name: m, revision: main}\n", "model.revision: 'main' moves with the next upload; give the commit, or a digest of the weights"),
        (MINIMAL + "secondary: {type: shelf}\n", "secondary: expected a list of tiers ('- type: ...'), got a mapping"),
        (MINIMAL + "secondary: [shelf]\n", "secondary[0]: expected a mapping of options ('type: ...'), got 'shelf'"),
        (MINIMAL + "secondary: [{tpye: shelf}]\n", "secondary[0]: unknown option 'tpye'. Did you mean 'type'?"),
        (MINIMAL + "secondary: [{type: }]\n", "secondary[0]: type: expected a text, got nothing"),
        (MINIMAL + "secondary: [{type: [shelf]}]\n", "secondary[0]: type: expected a text, got a list"),
        (MINIMAL + "secondary: [{type: '${KVTIERS_TEST_UNSET}'}]\n", "secondary[0]: type: environment variable 'KVTIERS_TEST_UNSET' is not set"),
        (MINIMAL + "version: &a [*a]\n", "line 3, column 1: key 'version' is already on line 1; remove one of the two"),
        (MINIMAL + "namespace: &a [*a]\n", "namespace: it contains itself, by an alias"),
        (MINIMAL + LAUGHS, "line 8, column 4: it stands for more than 100,000 values, by its aliases; write out what is meant"),
    ],
)  # fmt: skip
def test_a_single_mistake_is_a_single_line(wrong, text, line):
    assert wrong(text) == [line]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("quotas: {blue: 1GiB}", "secondary[0] (shelf): quotas: the config has no 'tenants'; add 'tenants: {}'"),
        ("quotas: {Blue: 1GiB}", "secondary[0] (shelf): quotas: tenant 'Blue' cannot be used; expected 1 to 64 of a-z 0-9 . _ -, first a letter or digit, no '..', or '*' for each other tenant"),
        ("quotas: {blue: 0}", "secondary[0] (shelf): quotas.blue: expected more than 0, got 0"),
        ("quotas: {blue: 1GiB}\nprocesses: 2", "secondary[0] (shelf): 'quotas' are counted in one tier host; leave out 'processes'"),
        ("niec: 3", "secondary[0] (shelf): unknown option 'niec'. Did you mean 'nice'?"),
        ("name: 5", "secondary[0] (shelf): name: expected a text, got 5; put it in quotes"),
        ("name: off", "secondary[0] (shelf): name: expected a text, got false; put it in quotes"),
        (
            "name: primary",
            "secondary[0] (shelf): name: 'primary' stands for the engine's own memory in every report; choose another",
        ),
        (
            "name: gpu",
            "secondary[0] (shelf): name: 'gpu' stands for the engine's own memory in every report; choose another",
        ),
        ("name: a b", "secondary[0] (shelf): name: 'a b' cannot be used; expected 1 to 63 of A-Z a-z 0-9 . _ -, first a letter or digit"),
        ("io: on", "secondary[0] (shelf): io: expected 'process' or 'thread', got true"),
        ("threads: four", "secondary[0] (shelf): threads: expected a whole number, got 'four'"),
        ("threads: 1.5", "secondary[0] (shelf): threads: expected a whole number, got 1.5"),
        ("threads: 0", "secondary[0] (shelf): threads: expected at least 1, got 0"),
        ("threads: 1000", "secondary[0] (shelf): threads: expected at most 256, got 1000"),
        ("speed: .nan", "secondary[0] (shelf): speed: expected a finite number, got nan"),
        ("nodes: here", "secondary[0] (shelf): nodes: expected a list of text, got 'here'"),
        ("nodes: [here, 5]", "secondary[0] (shelf): nodes[1]: expected a text, got 5; put it in quotes"),
        ("labels: {a: [1]}", "secondary[0] (shelf): labels.a: expected a text, got a list"),
        ("breaker: 5", "secondary[0] (shelf): breaker: expected a mapping of options, got 5"),
        ("breaker: {failure: 5}", "secondary[0] (shelf): breaker: unknown option 'failure'. Did you mean 'failures'?"),
        ("breaker: {failures: x}", "secondary[0] (shelf): breaker.failures: expected a whole number, got 'x'"),
        ("breaker: {window: 0s}", "secondary[0] (shelf): breaker.window: expected more than 0, got '0s'"),
        ("password: 12345", "secondary[0] (shelf): password: expected a text (a number in quotes), '${NAME}' or {file: PATH}"),
        ("password: ${KVTIERS_TEST_UNSET}", "secondary[0] (shelf): password: environment variable 'KVTIERS_TEST_UNSET' is not set"),
        ("password: ${not a name}", "secondary[0] (shelf): password: '${not a name}' does not name an environment variable"),
        ("password: ${HOME", "secondary[0] (shelf): password: '${' without its '}'"),
        ("password: {file: /nonexistent/file}", "secondary[0] (shelf): password: cannot read the secret's file: [Errno 2] No such file or directory: '/nonexistent/file'"),
        ("ttl: ${KVTIERS_TEST_UNSET}", "secondary[0] (shelf): ttl: environment variable 'KVTIERS_TEST_UNSET' is not set"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_tier_names_the_tier_and_its_type(wrong, with_tier, options, line):
    assert wrong(with_tier(options)) == [line]


def test_a_missing_option_of_a_tier_is_named(wrong):
    assert wrong(MINIMAL + "secondary: [{type: shelf}]\n") == [
        "secondary[0] (shelf): 'path' is missing; expected a text"
    ]


def test_a_tier_without_a_type_lists_the_installed_ones(wrong):
    (line,) = wrong(MINIMAL + "secondary: [{path: /a}]\n")
    assert line.startswith("secondary[0]: 'type' is missing; expected an installed tier type (")
    assert "shelf" in line


def test_an_unknown_tier_type_is_suggested(wrong):
    (line,) = wrong(MINIMAL + "secondary: [{type: shlef}]\n")
    assert line.startswith("secondary[0]: unknown tier type 'shlef'. Did you mean 'shelf'? Installed tier types: ")


def test_an_unknown_eviction_policy_is_suggested(wrong):
    (line,) = wrong("version: 1\nprimary: {capacity: 1, eviction: lur}\n")
    assert line.startswith("primary.eviction: unknown eviction policy 'lur'. Did you mean 'lru'?")


def test_a_broken_plugin_is_one_line_and_the_other_tiers_are_still_checked(wrong, distributions):
    distributions.install_tier("broken", "import no_such_library")
    lines = wrong(MINIMAL + "secondary: [{type: broken}, {type: shelf, pth: /a}]\n")
    assert [line.partition(":")[0] for line in lines] == ["secondary[0] (broken)", "secondary[1] (shelf)"]
    assert "No module named 'no_such_library'" in lines[0]


def test_two_tiers_of_one_name_name_both_places(wrong):
    assert wrong(MINIMAL + "secondary: [{type: shelf, path: /a}, {type: shelf, path: /b}]\n") == [
        "secondary[1] (shelf): the name 'shelf' is already that of secondary[0]; give one of them another 'name'"
    ]


def test_all_mistakes_are_reported_at_once(wrong):
    lines = wrong("version: 3\nprimary: {capacity: x}\nsecondary: [{type: shelf}, {type: shelf, path: 5}]\n")
    assert [line.partition(": ")[0] for line in lines] == [
        "version", "primary.capacity", "secondary[0] (shelf)", "secondary[1] (shelf)",
    ]  # fmt: skip


def test_two_tiers_of_one_store_are_refused_by_their_names(wrong):
    fs = "type: fs, capacity: 1GiB"
    tiers = f"{{{fs}, name: one, path: /a}}, {{{fs}, path: /b}}, {{{fs}, name: two, path: /a//}}"
    (line,) = wrong(MINIMAL + f"secondary: [{tiers}]\n")
    assert line.startswith("secondary[2] (fs): 'two' is the same store as 'one' (/a): each value would be written and ")


def test_two_tiers_of_which_nobody_says_what_their_stores_are_may_be_two(tiers_yaml, shelf):
    tiers_yaml.write_text(MINIMAL + "secondary: [{type: shelf, path: /a}, {type: shelf, name: two, path: /a}]\n")
    assert len(load_config(tiers_yaml).secondary) == 2
