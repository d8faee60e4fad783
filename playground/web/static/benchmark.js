// The Benchmark page: the form on the left, what was measured on the right. Needs benchmark_form.js
// and benchmark_results.js.
const results = new BenchResults();
const form = new BenchForm(async (asked) => {
  form.starter.disabled = true;
  const started = await server.start(asked);
  form.starter.disabled = false;
  if (!started || started.error) form.complain(started?.error);
  else await results.list(started.id);
});

function linked() {
  return props.value?.open ?? new URL(location.href).searchParams.get("benchmark");
}

element.querySelector(".bench").append(form.host, results.host);
form.fill().then((menus) => {
  if (menus) results.menus = menus;
  results.list(linked());
});
// Fresh whenever the page comes into view: a tab switch, the window's return.
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting)) results.poll();
}).observe(element);
document.addEventListener("visibilitychange", () => { if (!document.hidden) results.poll(); });
watch("value", () => { if (props.value?.open) results.list(props.value.open); });
