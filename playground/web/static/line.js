// Plain text from Python, kept plain.
const line = element.firstElementChild;
const show = () => { line.textContent = String(props.value ?? ""); };
watch("value", show);
show();
