//! Pod templates of a role: resolved, and with all that pods get from the group.

use rbg_api::v1alpha2::{InstanceComponent, LeaderWorkerPattern, TemplateRef};
use rbg_api::{PodTemplate, keys, merge};
use serde_json::{Value, json};

use crate::affinity::ForeignPodKind;
use crate::manifest::StringMap;
use crate::role::{RolePattern, RoleRenderer};
use crate::workload::{PreservedFields, WorkloadKind};
use crate::{RenderError, affinity, canonical, environment, gang, legacy, runtime_profile, topology};

const VOLUME: &str = "rbg-cluster-config";
const MOUNT_PATH: &str = "/etc/rbg";
const FILE: &str = "config.yaml";

/// What a pod gets besides its environment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TemplateInjection {
    /// The discovery file.
    pub(crate) discovery_file: bool,
    /// The containers of the role's runtime profiles.
    pub(crate) runtimes: bool,
    /// What leader and workers know of each other.
    pub(crate) leader_worker: bool,
}

/// The pod templates of one role.
pub(crate) struct PodTemplates<'r, 'a> {
    role: &'r RoleRenderer<'a>,
    labels: StringMap,
}

type LabelPair = (&'static str, String);

impl<'r, 'a> PodTemplates<'r, 'a> {
    /// Templates whose pods have these labels.
    pub(crate) fn new(role: &'r RoleRenderer<'a>, labels: StringMap) -> Self {
        Self { role, labels }
    }

    /// The pod of a role whose instances are single pods.
    pub(crate) fn single(&self, labels: &[LabelPair]) -> Result<PodTemplate, RenderError> {
        self.render(self.base()?, self.role.injection(), labels)
    }

    pub(crate) fn leader(
        &self,
        pattern: &LeaderWorkerPattern,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "leaderTemplatePatch", pattern.leader_template_patch.as_ref())?;
        self.render(template, TemplateInjection { leader_worker: true, ..self.role.injection() }, labels)
    }

    pub(crate) fn worker(
        &self,
        pattern: &LeaderWorkerPattern,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "workerTemplatePatch", pattern.worker_template_patch.as_ref())?;
        let injection = TemplateInjection { leader_worker: true, runtimes: false, ..self.role.injection() };
        self.render(template, injection, labels)
    }

    pub(crate) fn component(&self, component: &InstanceComponent) -> Result<PodTemplate, RenderError> {
        let mut template = component.template.clone();
        template.set_annotations(&component.annotations);
        template.set_labels(&component.labels);
        let size = (keys::COMPONENT_SIZE, component.size().to_string());
        self.render(template, self.role.injection(), &[size])
    }

    /// The pod of a workload that is not ours.
    pub(crate) fn external_pod(&self, kept: &PreservedFields) -> Result<PodTemplate, RenderError> {
        self.render_external(self.base()?, self.role.injection(), kept, ForeignPodKind::Single)
    }

    pub(crate) fn external_leader(
        &self,
        pattern: &LeaderWorkerPattern,
        kept: &PreservedFields,
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "leaderTemplatePatch", pattern.leader_template_patch.as_ref())?;
        self.render_external(template, self.role.injection(), kept, ForeignPodKind::Leader)
    }

    pub(crate) fn external_worker(
        &self,
        pattern: &LeaderWorkerPattern,
        kept: &PreservedFields,
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "workerTemplatePatch", pattern.worker_template_patch.as_ref())?;
        let injection = TemplateInjection { runtimes: false, ..self.role.injection() };
        self.render_external(template, injection, kept, ForeignPodKind::Worker)
    }

    /// With what our own pods get when they are made.
    fn render_external(
        &self,
        template: PodTemplate,
        injection: TemplateInjection,
        kept: &PreservedFields,
        who: ForeignPodKind,
    ) -> Result<PodTemplate, RenderError> {
        let role = self.role;
        let mut template = self.render(template, injection, &[])?;
        if role.is_legacy(kept) {
            template.set_labels(&role.legacy_labels());
            legacy::add_environment(&mut template);
        }
        if let Some(topology) = role.topology(kept)? {
            affinity::add_external_pod_affinity(
                &mut template,
                &topology,
                (role.group.name, &role.spec.name),
                who,
            );
        }
        Ok(template)
    }

    /// The role's template, or its role template with the patch.
    fn base(&self) -> Result<PodTemplate, RenderError> {
        let (template, reference) = match self.role.pattern {
            RolePattern::Standalone(pattern) => (&pattern.template, &pattern.template_ref),
            RolePattern::LeaderWorker(pattern) => (&pattern.template, &pattern.template_ref),
            RolePattern::Custom(_) => (&None, &None),
        };
        match (reference, template) {
            (Some(reference), _) => self.resolve_reference(reference),
            (None, Some(template)) => Ok(template.clone()),
            (None, None) => Err(RenderError::NoTemplate(self.role.spec.name.clone())),
        }
    }

    fn resolve_reference(&self, reference: &TemplateRef) -> Result<PodTemplate, RenderError> {
        let role = &self.role.spec.name;
        let mut templates = self.role.group.object.spec.role_templates.iter();
        let named = templates.find(|template| template.name == reference.name);
        let named = named.ok_or_else(|| RenderError::UnknownTemplate {
            role: role.clone(),
            template: reference.name.clone(),
        })?;
        self.apply_patch(named.template.clone(), "templateRef.patch", reference.patch.as_ref())
    }

    fn apply_patch(
        &self,
        template: PodTemplate,
        name: &'static str,
        patch: Option<&Value>,
    ) -> Result<PodTemplate, RenderError> {
        merge::pod_template(&template, patch).map_err(|cause| RenderError::Patch {
            role: self.role.spec.name.clone(),
            patch: name,
            cause,
        })
    }

    fn render(
        &self,
        mut template: PodTemplate,
        injection: TemplateInjection,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let role = self.role;
        if injection.discovery_file {
            mount_discovery_file(&mut template, role.group.name);
        }
        if injection.runtimes {
            runtime_profile::inject(role, &mut template)?;
            inject_update_annotations(role, &mut template);
        }
        environment::inject(&mut template, environment::role_variables(role));
        if injection.leader_worker {
            environment::inject(&mut template, environment::leader_worker_variables(role));
        }
        topology::inject(role, &mut template);
        gang::inject(role.group, &mut template);
        template.set_labels(&self.labels);
        let labels: StringMap =
            labels.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        template.set_labels(&labels);
        Ok(canonical::pod_template(template))
    }
}

/// Whoever restarts the pods finds what the role says about it at the pods, unless their template says something else. Of
/// pulling images first, the group may speak for all of its roles.
fn inject_update_annotations(role: &RoleRenderer<'_>, template: &mut PodTemplate) {
    if role.kind() != WorkloadKind::RoleInstanceSet {
        return;
    }
    let of_group = |key| role.group.object.metadata.annotations.as_ref()?.get(key);
    let said = [
        (keys::UPGRADE_HOOKS, None),
        (keys::UPGRADE_TIMEOUT, None),
        (keys::PRE_PULL, of_group(keys::PRE_PULL)),
        (keys::PRE_PULL_TIMEOUT, of_group(keys::PRE_PULL_TIMEOUT)),
    ];
    let missing: StringMap = said
        .into_iter()
        .filter(|(key, _)| template.annotation(key).is_none())
        .filter_map(|(key, of_group)| {
            let value = role.spec.annotations.get(key).or(of_group)?;
            Some((key.to_owned(), value.clone()))
        })
        .collect();
    template.set_annotations(&missing);
}

fn mount_discovery_file(template: &mut PodTemplate, config_map: &str) {
    let named = |item: &Value| item.get("name").and_then(Value::as_str) == Some(VOLUME);
    let volumes = template.list_mut("volumes");
    if !volumes.iter().any(named) {
        let items = json!([{ "key": FILE, "path": FILE }]);
        volumes.push(json!({ "name": VOLUME, "configMap": { "name": config_map, "items": items } }));
    }
    for container in template.list_mut("containers").iter_mut().filter_map(Value::as_object_mut) {
        let mounts = rbg_api::template::member_list(container, "volumeMounts");
        if !mounts.iter().any(|mount| named(mount) && mount.get("mountPath") == Some(&MOUNT_PATH.into())) {
            mounts.push(json!({ "name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": true }));
        }
    }
}
