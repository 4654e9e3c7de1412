/* The page: its frame, which view the address names, and what is said when the daemon is away.

   Views are named by what follows the address's #: #/ , #/model/NAME, #/try/NAME, #/updates, #/live, #/log. */

import { html, render, useEffect, useRef, useState } from "./html.js";
import { closeRestart, login, logout, start, useDaemon } from "./daemon.js";
import { Problem, placeIn } from "./parts.js";
import { time } from "./words.js";
import { Overview } from "./overview.js";
import { Model } from "./model.js";
import { TryIt } from "./try_it.js";
import { Updates } from "./updates.js";
import { Live } from "./live.js";
import { Log } from "./log.js";
import { forgetTalks } from "./chat.js";

const VIEWS = { "": Overview, model: Model, try: TryIt, updates: Updates, live: Live, log: Log };
const TABS = [["", "Overview"], ["try", "Try it"], ["updates", "Updates"], ["live", "Live"], ["log", "Log"]];
const TITLES = { ...Object.fromEntries(TABS), model: "Model" };

function App() {
  const { session, overview, lostSince, restartedAt } = useDaemon();
  const [{ view, name }, go] = useState(placeIn(VIEWS));
  const main = useRef(null);
  const isFirst = useRef(true);

  useEffect(() => {
    const changed = () => go(placeIn(VIEWS));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);

  useEffect(() => {
    document.title = `${name || TITLES[view]} · ${session?.device ?? "edge-runtime"}`;
  }, [view, name, session?.device]);

  useEffect(() => {
    // Who hears the page, or goes by the keyboard, is led to what is new.
    if (!isFirst.current) {
      main.current?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [view, name]);

  useEffect(forgetTalks, [session?.name ?? null]);

  const isClosed = session?.needs_token ?? false;
  const View = VIEWS[view];
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header>
      <div class="top">
        <a class="brand" href="#/"><img src="/page/icon.svg" alt="" width="28" height="28" />
          <span>${session?.device ?? "edge-runtime"}</span></a>
        <${Session} session=${session} />
      </div>
      ${!isClosed &&
      html`<nav aria-label="Views">
        ${TABS.map(
          ([each, words]) => html`<a key=${each} href=${`#/${each}`} aria-current=${isOf(each, view) ? "page" : null}>${words}</a>`,
        )}
      </nav>`}
    </header>
    <div class="bars" role="status">
      ${lostSince && html`<p class="bar lost">No answer since ${time(lostSince)}; trying again.</p>`}
      ${restartedAt &&
      !lostSince &&
      html`<p class="bar back">The daemon was restarted, and answers again since ${time(restartedAt)}.
        <button type="button" class="plain" onClick=${closeRestart}>Close</button></p>`}
    </div>
    <main id="main" tabindex="-1" ref=${main} class=${lostSince ? "old" : ""}>
      ${isClosed ? html`<${Login} />` : session !== null && html`<${View} key=${`${view}/${name}`} name=${name} />`}
      ${session === null && !lostSince && html`<p class="note">Asking the daemon…</p>`}
    </main>
    <footer>
      edge-runtime ${session?.version ?? ""}${overview ? ` · profile ${overview.profile.name}` : ""}
      ${session?.docs && html` · <a href=${session.docs} rel="noopener noreferrer" target="_blank">Documents</a>`}
    </footer>
  `;
}

const isOf = (tab, view) => tab === view || (tab === "" && view === "model");

function Session({ session }) {
  if (!session?.is_logged_in) return null;
  return html`<span class="session">${session.name} <button type="button" class="plain" onClick=${logout}>Log out</button></span>`;
}

function Login() {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await login(new FormData(event.target).get("token").trim());
    } catch (failed) {
      setError(failed);
      setBusy(false);
    }
  };
  return html`<section class="card narrow" aria-labelledby="login">
    <h1 id="login">Log in</h1>
    <p>This device wants a token.${" "}<code>edge-runtime token add NAME --may infer</code> makes one on the device.</p>
    <form onSubmit=${send}>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" autocomplete="current-password" required />
      <button type="submit" class="main" disabled=${isBusy}>${isBusy ? "Asking…" : "Log in"}</button>
    </form>
    ${error && html`<${Problem} error=${error} what="This token was not taken." />`}
  </section>`;
}

start();
render(html`<${App} />`, document.getElementById("app"));
