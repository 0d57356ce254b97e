"""Recognizes secrets by the name of a setting, flag, variable or header, by their form, and by their position in a URL or a command.

A name such as `api_key` or `db_pass` marks every value as a secret. A name such as `eos_token` or `sort_key` is ambiguous: it marks only
values that look generated. Placeholders (`$TOKEN`, `<token>`), references (`env:NAME`) and `true` are not secrets. Imports only the
standard library.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

_LONGEST_COMMAND = 20_000  # characters of a shell command that are split
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAST = _names("secret secrets passphrase passphrases passcode credential credentials authorization dsn cookie cookies bearer jwt")
_ENDS = ("password", "passwords", "passwd", "apikey", "apikeys", "dbpass", "sshpass", "userpass", "smtppass")
_SERVICES = _names(
    "openai anthropic gemini google gcp azure aws hf huggingface hub wandb comet neptune github gitlab bitbucket gitea slack discord "
    "telegram stripe twilio sendgrid mailgun mistral cohere groq openrouter replicate deepseek xai perplexity fireworks nvidia ngc "
    "langfuse langsmith pinecone serpapi tavily firecrawl databricks snowflake datadog sentry grafana dockerhub npm pypi notion jira "
    "cloudflare kaggle runpod"
)
_KEY_OF = _names("api access secret private encryption signing account auth hmac shared") | _SERVICES
_PASS_OF = _names(
    "db database user smtp mail email imap redis mysql mariadb pg postgres postgresql mongo ftp sftp ssh ldap admin root login proxy http "
    "https account service auth keystore key cert sudo vnc rabbitmq amqp mqtt registry"
)
_TOKEN_OF = (
    _names("access auth api bearer refresh session id bot personal private secret oauth csrf xsrf deploy registry vault") | _SERVICES
)
_TOKEN_IN_TEXT = _names(
    "eos bos pad unk mask sep cls eot eom eod fim prefix suffix middle image video audio stop start end begin special think thinking tool "
    "call role user system assistant turn first last next previous per page continuation continue sync new oov blank space newline decoder "
    "forced draft message text word vocabulary boundary separator delimiter"
)  # tokens of language models and of result pages
_SWITCHES = _names(
    "no use skip with without require requires allow show print prompt ask disable enable save reset check hide has is needs"
)
_AMBIGUOUS = _names("key keys token tokens pass pwd pw auth login sig signature")
_CONTAINERS = _names("secrets passwords cookies apikeys keys")
_VARIABLE = re.compile(
    r"(^|_)(API_?KEYS?|KEY|TOKEN|SECRETS?|PASS|PWD|CREDENTIALS?|AUTH|DSN|CONNECTION_STRING|COOKIES?|JWT)(_|$)|PASSWORD|PASSWD|PASSPHRASE"
)
_NO_SECRET = ("PWD", "OLDPWD")  # working directories of the shell
_TEMPLATE = r"""\$[A-Za-z_]\w*|\$\{.*\}|\$\(.*|<[^<>]*>|\[[^\[\]]*\]|\{[^{}":]*\}|\{\{[^{}]*\}\}|%\w+%|\*+"""
_PLACEHOLDER = re.compile(
    rf"""["']?(?:{_TEMPLATE}|[xX]{{3,}}|\.{{3,}}|env:\w+|file:[/~].*|~/\S*|/[\w.@+-]+(?:/[\w.@+-]+)*\.(?:pem|key|json|txt|pub|crt|p12|env)"""
    r"""|(?i:true|false|yes|no|none|null|on|off|auto|\d))?["']?""",
    re.DOTALL,
)
_MIXED = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[^\s<>|]{6,}")  # matches passwords, but not words of a model's vocabulary
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.I)
_TOKEN = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|gl(pat|rt|dt)-[A-Za-z0-9_-]{20,}"
    r"|xox[abceprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}|A[KS]IA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|AIza[A-Za-z0-9_-]{35}"
    r"|gsk_[A-Za-z0-9]{40,}|r8_[A-Za-z0-9]{30,}|[rs]k_live_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{36}|pypi-AgE[A-Za-z0-9_-]{20,}"
    r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|ya29\.[A-Za-z0-9_-]{20,}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
)
_SCHEME = re.compile(r"(?:Bearer|Basic|Token|Digest)\s+", re.I)
_CREDENTIAL = re.compile(r"\b(?:Bearer|Basic|Token) ([A-Za-z0-9._~+/=-]{16,})", re.I)
_WEBHOOK = re.compile(
    r"(https?://(?:hooks\.slack\.com/(?:services|workflows|triggers)/|(?:\w{1,20}\.)?discord(?:app)?\.com/api/(?:v\d{1,3}/)?webhooks/"
    r"|[\w-]{1,63}\.webhook\.office\.com/webhookb2/|outlook\.office(?:365)?\.com/webhook/|api\.telegram\.org/(?:file/)?bot"
    r"|hooks\.zapier\.com/hooks/catch/|maker\.ifttt\.com/trigger/[\w-]{1,100}/(?:json/)?with/key/))"
    r"(?![\w/:%.~+=@-]*[$<{\[])([\w:%.~+=@-][\w/:%.~+=@-]*)",
    re.I,
)
_OWN_WEBHOOK = re.compile(r"(https?://[^\s/?#]{1,255}/(?:[^\s/?#]{1,100}/){0,4}(?:web)?hooks?/)([A-Za-z0-9_-]{16,128})", re.I)
_AFTER_SCHEME = re.compile(r"""://((?:(?!://)[^\s"'<>`])*)""")
_PORT = re.compile(r"\d{1,5}(?:[/?#]|$)")
_QUERY = re.compile(r"[?&;]([A-Za-z_][\w.-]{0,60})=([^\s&;#\"'<>]+)")


def is_secret(name: str, value: str) -> bool:
    """Whether a value under this name (`api_key`, `--db-pass`, `OPENAI_KEY`, `wandbApiKey`) is a secret."""
    value = _SCHEME.sub("", value, count=1) if _SCHEME.match(value) else value
    if not value or _PLACEHOLDER.fullmatch(value):
        return False
    if marks_secret(name) or (may_be_secret(name) and looks_generated(value)):
        return True
    words = _words(name)
    return words[-1:] == ["token"] and words[-2] not in _TOKEN_IN_TEXT and words[0] not in _SWITCHES and _MIXED.fullmatch(value) is not None


def marks_secret(name: str) -> bool:
    """Whether the last words of a name mark every value as a secret."""
    words = _words(name)
    if not words or words[0] in _SWITCHES:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return not before or before in _TOKEN_OF
    if last == "pass":
        return not before or before in _PASS_OF
    if last in ("pwd", "pw"):
        return before in _PASS_OF
    return last in _LAST or last.endswith(_ENDS) or (last in ("key", "keys") and before in _KEY_OF)


def may_be_secret(name: str) -> bool:
    """Whether a name may mark a secret, so that a reference to a secret under this name is resolved."""
    words = _words(name)
    return marks_secret(name) or (bool(words) and words[-1] in _AMBIGUOUS)


def marks_secrets(name: str) -> bool:
    """Whether every value of a mapping under this name is a secret, as in `cookies` and `api_keys`."""
    return marks_secret(name) and _words(name)[-1] in _CONTAINERS


def _words(name: str) -> list[str]:
    words = [word.lower() for word in _WORD.findall(name)]
    return words[:-1] if words[-2:] == ["key", "id"] else words  # access_key_id


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable is withheld from processes that need no secrets. This includes variables with ambiguous names."""
    return name not in _NO_SECRET and _VARIABLE.search(name.upper()) is not None


def looks_generated(text: str) -> bool:
    """Whether a string looks like a generated key: a UUID, or at least 16 mixed letters and digits. False for paths and spaced text."""
    if _UUID.fullmatch(text):
        return True
    if re.match(r"[/~.]", text) or re.search(r"\s", text):
        return False
    runs = re.findall(r"[A-Za-z0-9]{16,}", text)
    return any(sum(one.isdigit() != other.isdigit() for one, other in pairwise(run)) >= 4 for run in runs)


def holds_secret(text: str) -> bool:
    """Whether a string contains a secret of a known form, a login or a token in a URL, or a bearer token."""
    if _TOKEN.search(text) or any(looks_generated(match[1]) for match in _CREDENTIAL.finditer(text)):
        return True
    return "://" in text and (hide_logins(text, "") != text or any(is_secret(match[1], match[2]) for match in _QUERY.finditer(text)))


def hide_logins(text: str, mark: str) -> str:
    """Replaces logins in URLs and webhook tokens with `mark`."""
    if "://" not in text:
        return text
    text = _WEBHOOK.sub(lambda match: f"{match[1]}{mark}", text)
    text = _OWN_WEBHOOK.sub(lambda match: f"{match[1]}{mark}" if looks_generated(match[2]) else match[0], text)
    return _AFTER_SCHEME.sub(lambda match: f"://{mark}{match[1][end:]}" if (end := login_end(match[1])) else match[0], text)


def login_end(rest: str) -> int:
    """Returns the index of the `@` that ends the login of a URL, or 0 if there is no login.

    `rest` is the text after `://`. A login is `user:password`, or a generated token alone. A password may contain `@`, `/`, `?` and `#`.
    """
    user, colon, after = rest.partition(":")
    if colon and not re.search(r"[/?#@\[]", user):
        at = after.rfind("@")
        login = at > 0 and not _PORT.match(after) and not re.fullmatch(_TEMPLATE, after[:at], re.DOTALL)
        login = login and not after[at + 1 :].startswith("sha256:")  # excludes a container image with its digest
        return len(user) + 1 + at if login else 0
    at = re.split(r"[/?#]", rest, maxsplit=1)[0].rfind("@")
    return at if at > 0 and looks_generated(rest[:at]) else 0


_SHELLS = _names("sh bash dash zsh ksh ash ssh env sudo su xargs timeout watch")
_LOGIN_FLAGS = {
    "curl": (re.compile(r"(-[sSfkLvIijgGN46]*[uU])(.*)", re.DOTALL), ("--user", "--proxy-user")),
    "http": (re.compile(r"(-a)(.*)", re.DOTALL), ("--auth",)),
}
_LOGIN_FLAGS |= {"https": _LOGIN_FLAGS["http"], "xh": _LOGIN_FLAGS["http"]}
_PASSWORD_FLAGS = {"sshpass": "-p", "redis-cli": "-a", "mysql": "-p", "mysqldump": "-p", "mariadb": "-p"}
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_HEADER = re.compile(r"(?:-[A-Za-z])?([A-Za-z][\w-]*):\s*(?:(?:Bearer|Basic|Token|Digest)\s+)?(\S.*)", re.DOTALL | re.I)
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)


def secrets_in_command(arguments: Sequence[str], *, shell: bool = False) -> Iterator[str]:
    """Yields the flags, variables and headers in a program's arguments that precede a secret, but not the secret.

    Args:
        shell: whether `arguments` are the words of a shell command. Then only names in upper case, as in `API_KEY=abc`, count as variables,
            because a word such as `api_key=abc` may be part of a program. Otherwise names in lower case count too.
    """
    program = ""
    arguments = [word.rstrip(";") for word in arguments] if shell else list(arguments)
    for before, word, after in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        base = word.rpartition("/")[2]
        program = base if base in _LOGIN_FLAGS or base in _PASSWORD_FLAGS else program
        flag, _, attached = word.partition("=")
        if not word.startswith("-"):
            flag, attached = "", word
        if value := _login_flag(program, word, after) or _header(word) or _header(attached):
            yield value
        elif _FLAG.fullmatch(flag) and is_secret(flag.lstrip("-"), attached or ("" if after.startswith("-") else after)):
            yield flag if flag.startswith("--") else f"{flag[:2]}..."  # -pVALUE may contain the secret itself
        elif value := _assigned(attached, shell=shell):
            yield value
        elif " " in word and (re.fullmatch(r"-\w*c", before) or arguments[0].rpartition("/")[2] in _SHELLS):
            yield from secrets_in_command(split_command(word), shell=True)


def split_command(text: str) -> list[str]:
    """Returns the words in the first 20,000 characters of a shell command. If the quotes do not match, splits them at white space."""
    try:
        return shlex.split(text[:_LONGEST_COMMAND])
    except ValueError:
        return text[:_LONGEST_COMMAND].split()


def _login_flag(program: str, word: str, after: str) -> str:
    """Returns the flag that precedes `user:password` or a password; empty if there is none."""
    if password := _PASSWORD_FLAGS.get(program, ""):
        apart = program in ("sshpass", "redis-cli") and word == password
        value = after if apart else word[2:] if word.startswith(password) else ""
        return password if value and not _PLACEHOLDER.fullmatch(value) else ""
    if program not in _LOGIN_FLAGS:
        return ""
    short, names = _LOGIN_FLAGS[program]
    flag, _, value = word.partition("=")
    if flag not in names:
        match = short.fullmatch(word)
        if match is None:
            return ""
        flag, value = match[1], match[2]
    _, colon, secret = (value or after).partition(":")
    return flag if colon and secret and not _PLACEHOLDER.fullmatch(secret) else ""


def _assigned(word: str, *, shell: bool) -> str:
    """Returns the variable's name in `API_KEY=abc` if its value is a secret; otherwise an empty string."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is None or (shell and not match[1].isupper()):
        return ""
    return match[1] if is_secret(match[1], match[2]) else ""


def _header(word: str) -> str:
    """Returns the header's name if the string is an HTTP header with a secret, such as an `Authorization` header with a bearer token;
    otherwise an empty string."""
    match = _HEADER.fullmatch(word)
    if match is None:
        return ""
    name, value = match[1].lower(), match[2].strip()
    if "-" not in name and name not in ("authorization", "cookie"):
        return ""
    if name in ("cookie", "set-cookie"):
        _, _, value = value.partition("=")
    return match[1] if is_secret(name, value) else ""
